//! What the server's variables say of its buffer pool.
//!
//! Sources: MariaDB documentation, "InnoDB Server Status Variables" and "Setting Innodb Buffer Pool Size Dynamically";
//! MySQL Reference Manual, "Configuring InnoDB Buffer Pool Size Online". Versions differ, so the variables are read
//! instead of the version: up to 10.11.11 MariaDB, and MySQL, resize by chunks of `innodb_buffer_pool_chunk_size` times
//! `innodb_buffer_pool_instances`, in the background; later MariaDB resizes by megabytes up to
//! `innodb_buffer_pool_size_max`, and the statement itself waits.

use std::collections::HashMap;

use crate::Bytes;

/// The question whose answer [`Figures::of`] understands.
pub(super) const QUESTION: &str = "\
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('innodb_buffer_pool_size', 'innodb_buffer_pool_size_max', \
'innodb_buffer_pool_chunk_size', 'innodb_buffer_pool_instances', 'innodb_page_size', 'pid_file');
SHOW GLOBAL STATUS WHERE Variable_name IN ('Innodb_buffer_pool_read_requests', 'Innodb_buffer_pool_reads', \
'Innodb_buffer_pool_pages_total', 'Innodb_buffer_pool_pages_dirty', 'Innodb_buffer_pool_resize_status');";

/// Sizes are a multiple of this where the server has no chunks.
const UNIT_WITHOUT_CHUNKS_BYTES: Bytes = 1 << 20;
/// The least that we ask for: a server can have less, and cannot work well with it.
const FLOOR_BYTES: Bytes = 64 << 20;
/// Pages are this part of the pool at least, the rest is what describes them: the pool has arrived when the pages
/// differ by no more.
const DESCRIPTORS_PART: u64 = 20;

/// The pool at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Figures {
    /// `innodb_buffer_pool_size`: the size that the server works towards.
    pub target_bytes: Bytes,
    /// Pages that the pool has.
    pub pages_bytes: Bytes,
    /// Pages that must be written before they can go.
    pub dirty_bytes: Bytes,
    /// Sizes are multiples of this.
    pub unit_bytes: Bytes,
    /// The most it can have without a restart; none where there is no such limit.
    pub ceiling_bytes: Option<Bytes>,
    /// Pages wanted since the server began.
    pub requests: u64,
    /// Pages of them that were read from disk.
    pub reads: u64,
    /// What the server says of a resize; empty when it says nothing.
    pub resize_status: String,
    /// The file with the server's process id; none when it has none.
    pub pid_file: Option<String>,
}

impl Figures {
    /// Understands the rows of an answer, `name<TAB>value`; the error names what is missing.
    pub(super) fn of(rows: &[String]) -> Result<Figures, String> {
        let values: HashMap<String, &str> = rows
            .iter()
            .filter_map(|row| row.split_once('\t'))
            .map(|(name, value)| (name.to_lowercase(), value))
            .collect();
        let number = |name: &str| -> Result<u64, String> {
            let value = values.get(name).ok_or_else(|| format!("it has no {name}: has it InnoDB?"))?;
            value.trim().parse().map_err(|_| format!("its {name} is {value:?}, not a number"))
        };
        let page_bytes = number("innodb_page_size")?.max(1);
        let chunk_bytes = number("innodb_buffer_pool_chunk_size").unwrap_or(0);
        let instances = number("innodb_buffer_pool_instances").unwrap_or(1).max(1);
        let unit_bytes = match chunk_bytes.saturating_mul(instances) {
            0 => UNIT_WITHOUT_CHUNKS_BYTES,
            unit_bytes => unit_bytes,
        };
        Ok(Figures {
            target_bytes: number("innodb_buffer_pool_size")?,
            pages_bytes: number("innodb_buffer_pool_pages_total")?.saturating_mul(page_bytes),
            dirty_bytes: number("innodb_buffer_pool_pages_dirty")?.saturating_mul(page_bytes),
            unit_bytes,
            ceiling_bytes: number("innodb_buffer_pool_size_max").ok().filter(|max| *max > 0),
            requests: number("innodb_buffer_pool_read_requests")?,
            reads: number("innodb_buffer_pool_reads")?,
            resize_status: values.get("innodb_buffer_pool_resize_status").copied().unwrap_or_default().to_owned(),
            pid_file: values.get("pid_file").filter(|path| path.starts_with('/')).map(|path| (*path).to_owned()),
        })
    }

    /// What the pool has now. The variable tells the target as soon as it is set, the pages follow; what describes them
    /// is not counted in them.
    pub(super) fn pool_bytes(&self) -> Bytes {
        let tolerance_bytes = self.target_bytes / DESCRIPTORS_PART;
        let arrived = self.pages_bytes.abs_diff(self.target_bytes) <= tolerance_bytes;
        if arrived { self.target_bytes } else { self.pages_bytes }
    }

    /// The least that is asked for.
    pub(super) fn floor_bytes(&self) -> Bytes {
        self.rounded(FLOOR_BYTES.max(self.unit_bytes))
    }

    /// The next size that the server can have: it would round up itself, with chunks, or down, without.
    pub(super) fn rounded(&self, bytes: Bytes) -> Bytes {
        bytes.div_ceil(self.unit_bytes).saturating_mul(self.unit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    const NEW: &str = "innodb_buffer_pool_chunk_size\t0\ninnodb_buffer_pool_size\t33554432\n\
        innodb_buffer_pool_size_max\t8796093022208\ninnodb_page_size\t16384\npid_file\t/run/x/pid\n\
        Innodb_buffer_pool_pages_dirty\t2680\nInnodb_buffer_pool_pages_total\t32448\n\
        Innodb_buffer_pool_read_requests\t914\nInnodb_buffer_pool_reads\t165\n\
        Innodb_buffer_pool_resize_status\tWithdrawing blocks. (983/30420).";

    #[test]
    fn a_server_that_shrinks_has_its_pages_still() {
        let figures = Figures::of(&rows(NEW)).expect("complete");
        assert_eq!((figures.target_bytes, figures.pool_bytes()), (32 << 20, 32448 * 16384));
        assert_eq!((figures.unit_bytes, figures.ceiling_bytes), (1 << 20, Some(8 << 40)));
        assert_eq!(figures.pid_file.as_deref(), Some("/run/x/pid"));
        let done = Figures { pages_bytes: 2028 * 16384, ..figures };
        assert_eq!(done.pool_bytes(), 32 << 20);
        assert_eq!(done.rounded((100 << 20) + 1), 101 << 20);
    }

    #[test]
    fn a_server_with_chunks_has_sizes_of_whole_ones() {
        let old = NEW.replace("chunk_size\t0", "chunk_size\t134217728\ninnodb_buffer_pool_instances\t2");
        let figures = Figures::of(&rows(&old)).expect("complete");
        assert_eq!((figures.unit_bytes, figures.floor_bytes()), (256 << 20, 256 << 20));
        assert_eq!(figures.rounded(300 << 20), 512 << 20);
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = Figures::of(&rows("innodb_page_size\t16384")).expect_err("incomplete");
        assert!(error.contains("innodb_buffer_pool_size") && error.contains("InnoDB"), "{error}");
        let error = Figures::of(&rows(&NEW.replace("\t914", "\tmany"))).expect_err("no number");
        assert!(error.contains("many"), "{error}");
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(
            values in proptest::collection::vec("[0-9-]{0,22}|\\PC{0,9}", 12),
            bytes: u64,
        ) {
            let names = NEW.lines().filter_map(|row| row.split_once('\t')).map(|(name, _)| name);
            let rows: Vec<String> = names.zip(&values).map(|(name, value)| format!("{name}\t{value}")).collect();
            if let Ok(figures) = Figures::of(&rows) {
                let _ = (figures.pool_bytes(), figures.floor_bytes(), figures.rounded(bytes));
            }
        }
    }
}
