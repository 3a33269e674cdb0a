//! The control file, `global/pg_control`: who a data directory is and where its recovery starts.
//!
//! Source of the layout: PostgreSQL, `src/include/catalog/pg_control.h` of versions 15 to 18. Up to the field
//! `data_checksum_version` it is the same in all of them; 18 has one more byte, which moves the checksum by four.
//! Numbers are of the machine's own byte order; PostgreSQL itself tells a foreign order by an absurd format version,
//! and so do we.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::beneath::Directory;
use crate::crc32c::crc32c;
use crate::{ControlFileError, Lsn, PostgresError};

/// Physical size of the file.
const FILE_BYTES: usize = 8192;
/// Where it is in a data directory.
const CONTROL_FILE: &str = "global/pg_control";

/// Format, catalog version, major version and offset of the checksum of every supported version.
const LAYOUTS: [(u32, u32, u32, usize); 4] = [
    (1300, 202_209_061, 15, 288),
    (1300, 202_307_071, 16, 288),
    (1700, 202_406_281, 17, 288),
    (1800, 202_506_291, 18, 292),
];

const STATE_OFFSET: usize = 16;
const MIN_RECOVERY_POINT_OFFSET: usize = 136;
const MIN_RECOVERY_TIMELINE_OFFSET: usize = 144;
/// `DB_SHUTDOWNED_IN_RECOVERY`.
const STATE_SHUT_DOWN_IN_RECOVERY: u32 = 2;

/// What a data directory is doing, or was doing when its server died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterState {
    /// Starting up.
    Startup,
    /// Shut down as a primary.
    ShutDown,
    /// Shut down while in recovery, as a standby is.
    ShutDownInRecovery,
    /// Shutting down.
    ShuttingDown,
    /// Recovering after a crash.
    InCrashRecovery,
    /// Following an archive or a primary.
    InArchiveRecovery,
    /// In production.
    InProduction,
}

/// How much the write-ahead log tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WalLevel {
    /// Enough for crash recovery only.
    Minimal,
    /// Enough for standbys.
    Replica,
    /// Enough for logical decoding.
    Logical,
}

/// The content of a control file, as far as we use it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlFile {
    /// Unique identifier of the cluster; the same for a primary and its standbys.
    pub system_identifier: u64,
    /// Major version of PostgreSQL.
    pub major_version: u32,
    /// Version of the system catalogs.
    pub catalog_version: u32,
    /// State of the data directory.
    pub state: ClusterState,
    /// Time of the last change of the file, in seconds since 1970.
    pub changed_at_seconds: i64,
    /// Position of the last checkpoint's record.
    pub checkpoint: Lsn,
    /// Position at which the recovery from that checkpoint starts.
    pub checkpoint_redo: Lsn,
    /// Timeline of that checkpoint.
    pub timeline: u32,
    /// Whether the log holds a full image of each page's first change from that checkpoint on: what repairs torn pages.
    pub full_page_writes: bool,
    /// A standby is consistent only from here on; invalid for a primary.
    pub min_recovery_point: Lsn,
    /// Timeline of that position.
    pub min_recovery_timeline: u32,
    /// Where the backup began that this directory comes from; invalid when it is over.
    pub backup_start: Lsn,
    /// Level of the log.
    pub wal_level: WalLevel,
    /// Whether hint bits are logged (needed to rewind).
    pub wal_log_hints: bool,
    /// Size of a data page in bytes.
    pub block_bytes: u32,
    /// Size of a log segment in bytes.
    pub wal_segment_bytes: u32,
    /// Whether data pages carry checksums.
    pub data_checksums: bool,
}

impl ControlFile {
    /// Reads the control file of a data directory. The file is read again, a few times, when its checksum is wrong: a
    /// running server may be writing it.
    ///
    /// # Errors
    /// [`PostgresError::File`], [`PostgresError::ControlFile`].
    pub fn read(data_directory: &Path) -> Result<ControlFile, PostgresError> {
        ControlFile::read_with_bytes(data_directory).map(|(control, _)| control)
    }

    /// The same, with the bytes that it was understood from.
    ///
    /// # Errors
    /// As [`ControlFile::read`].
    pub fn read_with_bytes(data_directory: &Path) -> Result<(ControlFile, Vec<u8>), PostgresError> {
        const ATTEMPTS_MAX: u32 = 5;
        let path = data_directory.join(CONTROL_FILE);
        let mut attempt = 1;
        loop {
            let read = Directory::open(data_directory).and_then(|directory| directory.read(Path::new(CONTROL_FILE)));
            let bytes = read.map_err(PostgresError::file("read", &path))?;
            match ControlFile::parse(&bytes) {
                Ok(control) => return Ok((control, bytes)),
                Err(ControlFileError::WrongChecksum { .. }) if attempt < ATTEMPTS_MAX => attempt += 1,
                Err(source) => return Err(PostgresError::ControlFile { path, source }),
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Understands the bytes of a control file.
    ///
    /// # Errors
    /// [`ControlFileError`]; never panics, whatever the bytes are.
    pub fn parse(bytes: &[u8]) -> Result<ControlFile, ControlFileError> {
        let bytes = bytes.get(..FILE_BYTES.min(bytes.len())).unwrap_or(bytes);
        let fields = Fields(bytes);
        let (_, catalog_version, major_version, checksum_offset) = fields.layout()?;
        let found = fields.u32(checksum_offset)?;
        let computed = crc32c(&bytes[..checksum_offset]);
        if found != computed {
            return Err(ControlFileError::WrongChecksum { found, computed });
        }
        Ok(ControlFile {
            system_identifier: fields.u64(0)?,
            major_version,
            catalog_version,
            state: fields.state(STATE_OFFSET)?,
            changed_at_seconds: fields.u64(24)?.cast_signed(),
            checkpoint: Lsn(fields.u64(32)?),
            checkpoint_redo: Lsn(fields.u64(40)?),
            timeline: fields.u32(48)?,
            full_page_writes: fields.flag(56)?,
            min_recovery_point: Lsn(fields.u64(MIN_RECOVERY_POINT_OFFSET)?),
            min_recovery_timeline: fields.u32(MIN_RECOVERY_TIMELINE_OFFSET)?,
            backup_start: Lsn(fields.u64(152)?),
            wal_level: fields.wal_level(172)?,
            wal_log_hints: fields.flag(176)?,
            block_bytes: fields.u32(216)?,
            wal_segment_bytes: fields.u32(228)?,
            data_checksums: fields.u32(252)? != 0,
        })
    }

    /// The control file of a standby that was shut down, made from one of a server whose files were taken as a crash
    /// would leave them: with a `standby.signal` PostgreSQL recovers from the checkpoint that the file names and lets
    /// nobody in before `min_recovery_point` on `timeline`.
    ///
    /// Source: PostgreSQL, `src/backend/access/transam/xlogrecovery.c`, `InitWalRecovery`: a file that says where
    /// consistency is enters archive recovery directly, without a crash recovery from the log that is there (there is
    /// none).
    ///
    /// # Errors
    /// Those of [`ControlFile::parse`]; never panics, whatever the bytes are.
    pub fn patch_for_standby(
        bytes: &[u8],
        min_recovery_point: Lsn,
        timeline: u32,
    ) -> Result<Vec<u8>, ControlFileError> {
        ControlFile::parse(bytes)?;
        let (_, _, _, checksum_offset) = Fields(bytes).layout()?;
        let mut patched = bytes.to_vec();
        patched.resize(FILE_BYTES, 0);
        let mut put = |offset: usize, field: &[u8]| patched[offset..offset + field.len()].copy_from_slice(field);
        put(STATE_OFFSET, &STATE_SHUT_DOWN_IN_RECOVERY.to_ne_bytes());
        put(MIN_RECOVERY_POINT_OFFSET, &min_recovery_point.0.to_ne_bytes());
        put(MIN_RECOVERY_TIMELINE_OFFSET, &timeline.to_ne_bytes());
        let checksum = crc32c(&patched[..checksum_offset]);
        patched[checksum_offset..checksum_offset + 4].copy_from_slice(&checksum.to_ne_bytes());
        Ok(patched)
    }
}

/// Fields at their offsets.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn layout(&self) -> Result<(u32, u32, u32, usize), ControlFileError> {
        let (format, catalog) = (self.u32(8)?, self.u32(12)?);
        let known = LAYOUTS.into_iter().find(|layout| (layout.0, layout.1) == (format, catalog));
        known.ok_or(ControlFileError::UnsupportedVersion { format, catalog })
    }

    fn array<const BYTES: usize>(&self, offset: usize) -> Result<[u8; BYTES], ControlFileError> {
        let field = self.0.get(offset..).and_then(|rest| rest.first_chunk::<BYTES>());
        field.copied().ok_or(ControlFileError::TooShort(self.0.len()))
    }

    fn u32(&self, offset: usize) -> Result<u32, ControlFileError> {
        Ok(u32::from_ne_bytes(self.array(offset)?))
    }

    fn u64(&self, offset: usize) -> Result<u64, ControlFileError> {
        Ok(u64::from_ne_bytes(self.array(offset)?))
    }

    fn flag(&self, offset: usize) -> Result<bool, ControlFileError> {
        Ok(self.array::<1>(offset)? != [0])
    }

    /// A C `int` that is never negative.
    fn state(&self, offset: usize) -> Result<ClusterState, ControlFileError> {
        Ok(match self.u32(offset)? {
            0 => ClusterState::Startup,
            1 => ClusterState::ShutDown,
            2 => ClusterState::ShutDownInRecovery,
            3 => ClusterState::ShuttingDown,
            4 => ClusterState::InCrashRecovery,
            5 => ClusterState::InArchiveRecovery,
            6 => ClusterState::InProduction,
            value => return Err(ControlFileError::ImpossibleValue { field: "state", value: value.into() }),
        })
    }

    fn wal_level(&self, offset: usize) -> Result<WalLevel, ControlFileError> {
        Ok(match self.u32(offset)? {
            0 => WalLevel::Minimal,
            1 => WalLevel::Replica,
            2 => WalLevel::Logical,
            value => return Err(ControlFileError::ImpossibleValue { field: "wal_level", value: value.into() }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A control file of one of the supported versions, made field by field.
    fn sample(layout: (u32, u32, u32, usize)) -> Vec<u8> {
        let mut bytes = vec![0; FILE_BYTES];
        let mut put = |offset: usize, field: &[u8]| bytes[offset..offset + field.len()].copy_from_slice(field);
        put(0, &7_123_456_789_u64.to_ne_bytes());
        put(8, &layout.0.to_ne_bytes());
        put(12, &layout.1.to_ne_bytes());
        put(16, &6_u32.to_ne_bytes());
        put(40, &0x1_0000_0028_u64.to_ne_bytes());
        put(48, &3_u32.to_ne_bytes());
        put(56, &[1]);
        put(172, &1_u32.to_ne_bytes());
        put(252, &1_u32.to_ne_bytes());
        seal(&mut bytes, layout.3);
        bytes
    }

    fn seal(bytes: &mut [u8], checksum_offset: usize) {
        let checksum = crc32c(&bytes[..checksum_offset]);
        bytes[checksum_offset..checksum_offset + 4].copy_from_slice(&checksum.to_ne_bytes());
    }

    #[test]
    fn every_version_is_read() {
        for layout in LAYOUTS {
            let control = ControlFile::parse(&sample(layout)).expect("valid");
            assert_eq!((control.major_version, control.timeline), (layout.2, 3));
            assert_eq!((control.state, control.wal_level), (ClusterState::InProduction, WalLevel::Replica));
            assert_eq!((control.checkpoint_redo, control.data_checksums), (Lsn(0x1_0000_0028), true));
            assert!(control.full_page_writes);
        }
    }

    #[test]
    fn a_patch_changes_three_fields_in_every_version() {
        for layout in LAYOUTS {
            let bytes = sample(layout);
            let before = ControlFile::parse(&bytes).expect("valid");
            let patched = ControlFile::patch_for_standby(&bytes, Lsn(0x1_0000_5000), 4).expect("patched");
            let expected = ControlFile {
                state: ClusterState::ShutDownInRecovery,
                min_recovery_point: Lsn(0x1_0000_5000),
                min_recovery_timeline: 4,
                ..before
            };
            assert_eq!(ControlFile::parse(&patched).expect("valid"), expected);
            let changed: Vec<usize> = (0..FILE_BYTES).filter(|offset| bytes[*offset] != patched[*offset]).collect();
            let checksum = layout.3..layout.3 + 4;
            let ours =
                |offset: &usize| (16..20).contains(offset) || (136..148).contains(offset) || checksum.contains(offset);
            assert!(patched.len() == FILE_BYTES && changed.iter().all(ours), "{changed:?}");
        }
    }

    #[test]
    fn other_versions_are_named() {
        // PostgreSQL 14 shares the format's number with 15: only the catalog tells them apart.
        let error = ControlFile::parse(&sample((1300, 202_107_181, 14, 288))).expect_err("version 14");
        assert_eq!(error, ControlFileError::UnsupportedVersion { format: 1300, catalog: 202_107_181 });
        assert!(error.to_string().contains("202107181"));
    }

    #[test]
    fn impossible_values_are_named() {
        for (offset, field) in [(16, "state"), (172, "wal_level")] {
            let mut bytes = sample(LAYOUTS[0]);
            bytes[offset..offset + 4].copy_from_slice(&[0xFF; 4]);
            seal(&mut bytes, 288);
            let error = ControlFile::parse(&bytes).expect_err("impossible");
            assert!(matches!(error, ControlFileError::ImpossibleValue { field: named, .. } if named == field));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
            prop_assert!(ControlFile::parse(&bytes).is_err());
            prop_assert!(ControlFile::patch_for_standby(&bytes, Lsn(1), 1).is_err());
        }

        #[test]
        fn every_position_survives_a_patch(
            layout in 0..LAYOUTS.len(),
            position: u64,
            timeline: u32,
            length in 296..9000_usize,
        ) {
            let mut bytes = sample(LAYOUTS[layout]);
            bytes.resize(length, 0);
            let patched = ControlFile::patch_for_standby(&bytes, Lsn(position), timeline).expect("patched");
            let control = ControlFile::parse(&patched).expect("valid");
            prop_assert_eq!((control.min_recovery_point, control.min_recovery_timeline), (Lsn(position), timeline));
            prop_assert_eq!(patched.len(), FILE_BYTES);
        }

        #[test]
        fn no_sealed_content_panics(layout in 0..LAYOUTS.len(), offset in 16..284_usize, byte: u8) {
            let mut bytes = sample(LAYOUTS[layout]);
            bytes[offset] = byte;
            seal(&mut bytes, LAYOUTS[layout].3);
            let patched = ControlFile::patch_for_standby(&bytes, Lsn(1), 1);
            prop_assert_eq!(patched.is_ok(), ControlFile::parse(&bytes).is_ok());
        }

        #[test]
        fn every_flipped_bit_is_detected(layout in 0..LAYOUTS.len(), bit in 0..288 * 8_usize) {
            let mut bytes = sample(LAYOUTS[layout]);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(ControlFile::parse(&bytes).is_err());
        }

        #[test]
        fn every_cut_is_detected(layout in 0..LAYOUTS.len(), length in 0..292_usize) {
            prop_assert!(ControlFile::parse(&sample(LAYOUTS[layout])[..length]).is_err());
        }
    }
}
