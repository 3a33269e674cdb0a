//! `onecopy disk create`: a new disk.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::HumanBytes;
use onecopy_disk::{BLOCK_BYTES, BaseSpecification, CreateOptions, Disk, TlsFiles, source};
use onecopy_disk_server::DiskServerError;

use super::copying::Copying;
use super::{amount, place};
use crate::output;
use crate::signals::{HangUp, StopSignal};

/// How often a copy is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Make a disk: empty, over a base, or as a copy that is filled while it is used
#[derive(Debug, Args)]
pub struct Create {
    /// The new disk's directory
    directory: PathBuf,
    /// Its size, as 16G; with a base, the base's size unless given
    #[arg(long, value_parser = amount::bytes, required_unless_present_any = ["base", "from"])]
    size: Option<u64>,
    /// Lie over a raw image or a disk's snapshot (DIRECTORY@SNAPSHOT), which must stay as it is
    #[arg(long, value_name = "BASE", conflicts_with = "from")]
    base: Option<String>,
    /// Copy a raw image, a disk's snapshot, or an NBD export (nbd://HOST/EXPORT, nbds://, nbd+unix://): what is touched
    /// at once, the rest in the background while the disk is served
    #[arg(long, value_name = "SOURCE")]
    from: Option<String>,
    /// Who signed the certificate of an nbds:// server, as PEM
    #[arg(long, value_name = "FILE", requires = "from")]
    tls_authority: Option<PathBuf>,
    /// Our certificate for it
    #[arg(long, value_name = "FILE", requires = "tls_authority", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Return when all of --from is copied; Ctrl-C ends the waiting, and the rest is copied when the disk is served
    #[arg(long, requires = "from")]
    wait: bool,
    /// Bytes a second that --wait copies, as 64M
    #[arg(long, value_name = "SIZE", value_parser = amount::bytes, requires = "wait")]
    limit: Option<u64>,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Create {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        let base = self.base()?;
        let size_bytes = self.size_bytes(base.as_ref())?;
        let named = |source| DiskServerError::Disk { directory: self.directory.clone(), source };
        let options = CreateOptions { size_bytes, base, copy_base: self.from.is_some() };
        Disk::create(&self.directory, &options).map_err(named)?;
        if self.wait {
            self.fill()?;
        }
        match self.json {
            true => output::say(serde_json::json!({ "event": "created", "size_bytes": size_bytes })),
            false => output::say(format_args!("{}: {}.", self.directory.display(), HumanBytes(size_bytes))),
        }
        Ok(())
    }

    fn base(&self) -> anyhow::Result<Option<BaseSpecification>> {
        let tls = self.tls_authority.clone().map(|authority| TlsFiles {
            authority,
            certificate: self.tls_certificate.clone(),
            key: self.tls_key.clone(),
        });
        self.base.as_ref().or(self.from.as_ref()).map(|text| place::base(text, tls)).transpose()
    }

    /// The size that was asked for, or that of the base in whole blocks.
    fn size_bytes(&self, base: Option<&BaseSpecification>) -> anyhow::Result<u64> {
        let base_bytes = match base {
            // Opened before anything is made: a base that is none leaves nothing behind.
            Some(base) => source::open(base, &self.directory, false)?.size_bytes().next_multiple_of(BLOCK_BYTES),
            None => 0,
        };
        let size_bytes = self.size.unwrap_or(base_bytes);
        anyhow::ensure!(
            size_bytes >= base_bytes,
            "{} is less than the base's {}: its end would be cut off; give a larger --size, or none",
            HumanBytes(size_bytes),
            HumanBytes(base_bytes)
        );
        Ok(size_bytes)
    }

    /// Copies until all is there or a signal comes.
    fn fill(&self) -> anyhow::Result<()> {
        let disk = onecopy_disk_server::open_at_rest(&self.directory)?;
        disk.set_hydration_limit(self.limit);
        let filled = crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            tokio::select! {
                filled = self.watch(&disk) => filled,
                () = signal.received() => Ok(()),
            }
        });
        disk.close().map_err(|source| DiskServerError::Disk { directory: self.directory.clone(), source })?;
        filled
    }

    async fn watch(&self, disk: &Disk) -> anyhow::Result<()> {
        let mut copying: Option<Copying> = None;
        let mut told = None;
        while let Some(hydration) = disk.hydration().filter(|state| !state.is_whole) {
            copying
                .get_or_insert_with(|| Copying::begin(hydration.total_bytes, self.json))
                .show(hydration.copied_bytes);
            if hydration.trouble.is_some() && hydration.trouble != told {
                output::note(format_args!("waiting: {}", hydration.trouble.as_deref().unwrap_or_default()));
            }
            told = hydration.trouble;
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }
}
