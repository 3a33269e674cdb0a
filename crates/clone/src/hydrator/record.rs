//! What a successor of this process must know of a clone, in memory that the keeper holds.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek, Write};
use std::os::fd::OwnedFd;

use onecopy_postgres::Lsn;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::CloneError;
use crate::image::{FileIdentity, Image};
use crate::keeper::{CLONE_PREFIX, KeptFiles, STATE_SUFFIX};
use crate::network::RemoteHost;
use crate::network::protocol::SessionId;
use crate::plan::Plan;

/// A clone that is not whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Which one, over all lives of a service.
    pub number: u64,
    /// What it shall be.
    pub plan: Plan,
    /// Where its content comes from, from the beginning on; none: from this host.
    #[serde(default)]
    pub elsewhere: Option<RemoteImage>,
    /// What there is of it; none while its directory is being made: then it cannot be gone on with.
    pub made: Option<RunnableClone>,
}

/// An image on another host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RemoteImage {
    /// The host.
    pub host: RemoteHost,
    /// Which image; none until the clone is made from it.
    pub session: Option<SessionId>,
}

/// What there is of a clone that can run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunnableClone {
    /// What it shall hold.
    pub image: Image,
    /// Which files are filled, in the image's order.
    pub targets: Vec<FileIdentity>,
    /// PostgreSQL's major version.
    pub major_version: u32,
    /// It answers queries from here on.
    pub consistent_at: Lsn,
}

impl Record {
    /// All that were kept, in the order of their numbers; those that cannot be read are named in the log.
    pub fn all(kept: &KeptFiles) -> Vec<Record> {
        let states = kept.iter().filter(|(name, _)| name.starts_with(CLONE_PREFIX) && name.ends_with(STATE_SUFFIX));
        let records = states.filter_map(|(name, file)| {
            let record = file.try_clone().map_err(CloneError::kernel("open a clone's state")).and_then(from_memory);
            record.inspect_err(|error| tracing::error!(name, %error, "a clone is lost")).ok()
        });
        let mut records: Vec<Record> = records.collect();
        records.sort_by_key(|record| record.number);
        records
    }
}

/// How fast a clone's background may go, when that was changed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Limit {
    /// None: as fast as it goes.
    pub bytes_per_second: Option<u64>,
}

/// Something in a file in memory.
///
/// # Errors
/// [`CloneError::Kernel`]: no memory, or a path that is no UTF-8.
pub fn to_memory(what: &impl Serialize) -> Result<OwnedFd, CloneError> {
    let make = || -> io::Result<OwnedFd> {
        let mut writer = BufWriter::new(File::from(memfd_create("onecopy-clone-state", MemfdFlags::CLOEXEC)?));
        serde_json::to_writer(&mut writer, what)?;
        writer.flush()?;
        Ok(writer.into_inner().map_err(io::IntoInnerError::into_error)?.into())
    };
    make().map_err(CloneError::kernel("write a clone's state"))
}

/// From there.
///
/// # Errors
/// [`CloneError::Kernel`]: something else.
pub fn from_memory<T: DeserializeOwned>(memory: OwnedFd) -> Result<T, CloneError> {
    let read = || -> io::Result<T> {
        let mut file = File::from(memory);
        file.rewind()?;
        Ok(serde_json::from_reader(BufReader::new(file))?)
    };
    read().map_err(CloneError::kernel("read a clone's state"))
}

/// The name under which a part of a clone is kept.
pub fn kept_name(number: u64, part: &str) -> String {
    format!("{CLONE_PREFIX}{number}-{part}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::network::server::tests::SourceHost;

    #[test]
    fn a_clone_of_another_host_is_recorded_as_such_before_there_is_an_image() {
        let directory = tempfile::tempdir().unwrap();
        let plan = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1)).plan();
        let host = RemoteHost { address: "db1:6440".to_owned(), keys: "/keys".into(), certificate: None };
        for session in [None, Some(SessionId::generate().unwrap())] {
            let elsewhere = Some(RemoteImage { host: host.clone(), session });
            let record = Record { number: 7, plan: plan.clone(), elsewhere, made: None };
            let read: Record = from_memory(to_memory(&record).unwrap()).unwrap();
            let elsewhere = read.elsewhere.expect("of another host");
            assert_eq!((elsewhere.host, elsewhere.session), (host.clone(), session));
        }
    }
}
