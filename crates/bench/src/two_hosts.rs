//! Two hosts of one authority on this machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::Context;
use onecopy_testing::process;
use tempfile::TempDir;

use crate::guests::Guests;

/// One host: the machines on it, and its keys.
pub struct Host {
    /// Its machines.
    pub guests: Guests,
    keys: PathBuf,
}

/// `onecopy host`, which ends when it is dropped.
pub struct Serving {
    child: Child,
    /// `HOST:PORT`.
    pub address: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        process::kill(self.child.id());
        let _ = self.child.wait();
    }
}

/// Makes them; the directory has their keys.
pub fn make(place: &Path) -> anyhow::Result<([Host; 2], TempDir)> {
    let keys = TempDir::new_in(place)?;
    let authority = keys.path().join("ca");
    let host = |name: &str| {
        let guests = Guests::new(place)?;
        let ca = authority.to_str().context("UTF-8")?;
        guests.run(&["host", "keys", "--ca", ca, "--name", name, "--address", "127.0.0.1"])?;
        anyhow::Ok(Host { guests, keys: authority.join(name) })
    };
    let hosts = [host("one")?, host("two")?];
    Ok((hosts, keys))
}

impl Host {
    /// The directory of its keys.
    pub fn keys(&self) -> anyhow::Result<&str> {
        self.keys.to_str().context("UTF-8")
    }

    /// `onecopy host` for its machines, with these options.
    pub fn serve(&self, options: impl IntoIterator<Item = OsString>) -> anyhow::Result<Serving> {
        let mut arguments = vec!["host".into(), "--listen".into(), "127.0.0.1:0".into(), "--keys".into()];
        arguments.extend([self.keys.clone().into(), "--machines".into(), self.guests.root().into()]);
        arguments.extend(options);
        let (child, address) = self.guests.serve(&arguments)?;
        Ok(Serving { child, address })
    }
}
