//! Files that are filled while the clone's server runs already. Made by the service of the source; this is its
//! client.

use std::sync::Arc;

use super::filesystem::{nameless_file, pairs, type_name};
use super::{CloneMethod, MakeFuture, MethodName, Report};
use crate::CloneError;
use crate::fanotify::{Group, PinnedGroup};
use crate::plan::Plan;

/// Who makes such clones: the client of [`crate::service`].
pub trait LazyMaker: Send + Sync {
    /// As [`CloneMethod::make`]; what a clone's postmaster must inherit is in [`super::PreparedClone::inherited`].
    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a>;
}

/// The method `lazy`.
pub struct Lazy {
    maker: Arc<dyn LazyMaker>,
}

impl Lazy {
    /// Made by this one.
    pub fn new(maker: Arc<dyn LazyMaker>) -> Lazy {
        Lazy { maker }
    }
}

impl CloneMethod for Lazy {
    fn name(&self) -> MethodName {
        MethodName::Lazy
    }

    fn obstacle(&self, plan: &Plan) -> Option<String> {
        obstacle(plan)
    }

    fn make<'a>(&'a self, plans: &'a [Plan], report: Report<'a>) -> MakeFuture<'a> {
        self.maker.make(plans, report)
    }
}

/// Why the kernel would not ask before files of the source and of the clone are accessed, or the clone's server could
/// not be made to wait for the answers.
pub(super) fn obstacle(plan: &Plan) -> Option<String> {
    let pairs = match pairs(plan) {
        Ok(pairs) => pairs,
        Err(error) => return Some(error.to_string()),
    };
    let group = match Group::new() {
        Ok(group) => group,
        Err(error) => return Some(format!("{error} (it takes CAP_SYS_ADMIN and Linux 6.14 or newer)")),
    };
    if let Err(error) = PinnedGroup::new(&group) {
        return Some(error.to_string());
    }
    pairs.iter().flat_map(|pair| pair.directories().into_iter().zip(pair.paths())).find_map(|(directory, path)| {
        let file = match nameless_file(&directory) {
            Ok(file) => file,
            Err(error) => return Some(CloneError::file("make a file in", path)(error).to_string()),
        };
        let name = type_name(&directory);
        // The mark goes with the group.
        let refused = group.mark_file(&file).err()?;
        Some(format!("{refused} of the file system {name} (it takes Linux 6.14 or newer and ext4, XFS or btrfs)"))
    })
}

#[cfg(test)]
mod tests {
    use onecopy_postgres::ConnectionParameters;

    use super::*;
    use crate::methods::choose;
    use crate::plan::{FillOptions, Recovery, SourceServer};

    /// From here on the kernel refuses io_uring to this thread and those that it starts, as a container's filter does.
    fn refuse_io_uring() {
        let statement = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
        let mut filter = [
            // `struct seccomp_data`: the number of the call is its first word.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 0, 1),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program outlives the calls, which bind this thread alone.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Spec: C4
    #[test]
    fn k20_without_io_uring_lazy_is_not_chosen_and_refused_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        std::fs::create_dir_all(source.join(crate::target::TABLESPACES_DIRECTORY)).unwrap();
        let plan = Plan {
            source: SourceServer {
                connection: ConnectionParameters {
                    host: "localhost".to_owned(),
                    port: 1,
                    user: "nobody".to_owned(),
                    password: None,
                    database: "none".to_owned(),
                    application_name: None,
                },
                data_directory: source,
                leader: None,
                replication: None,
            },
            target: directory.path().join("clone"),
            tablespaces: directory.path().join("tablespaces"),
            user_name: "nobody".to_owned(),
            slot: "clone".to_owned(),
            recovery: Recovery::Auto,
            fill: FillOptions::default(),
            wal_keep_bytes_max: 0,
        };
        assert_eq!(obstacle(&plan), None);
        let confined = || {
            refuse_io_uring();
            let refused = choose(Some(MethodName::Lazy), &plan).unwrap_err().to_string();
            for word in ["lazy is not possible", "io_uring", "kernel.io_uring_disabled", "seccomp", "--mode copy"] {
                assert!(refused.contains(word), "{word}: {refused}");
            }
            let chosen = choose(None, &plan).unwrap();
            assert!(chosen.name == MethodName::Copy && chosen.reason.contains("io_uring"), "{chosen:?}");
        };
        std::thread::scope(|scope| scope.spawn(confined).join().unwrap());
    }
}
