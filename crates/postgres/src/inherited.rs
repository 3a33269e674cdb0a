//! Descriptors that a postmaster gets from us under fixed numbers.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use crate::Settings;

/// The oldest PostgreSQL that knows `io_method`.
const IO_METHOD_VERSION_MIN: u32 = 18;

/// An open descriptor and the number under which a child finds it.
#[derive(Debug, Clone)]
pub struct InheritedDescriptor {
    /// What is inherited.
    pub descriptor: Arc<OwnedFd>,
    /// Its number in the child; the child's own descriptors are opened below it.
    pub number: i32,
}

/// Makes the program that `command` starts inherit these. The numbers mean nothing in this process.
pub(crate) fn hand_down(command: &mut Command, descriptors: &[InheritedDescriptor]) -> io::Result<()> {
    let Some(number_max) = descriptors.iter().map(|inherited| inherited.number).max() else { return Ok(()) };
    // One may lie under a number where another one shall go: from above all numbers nothing is overwritten before it is
    // placed.
    let raised = descriptors.iter().map(|inherited| {
        let copy = rustix::io::fcntl_dupfd_cloexec(&inherited.descriptor, number_max + 1)?;
        Ok((copy, inherited.number))
    });
    let raised = raised.collect::<io::Result<Vec<(OwnedFd, i32)>>>()?;
    let place = move || {
        for (copy, number) in &raised {
            // SAFETY: the new process is about to become another program: nothing in it uses what lies under this
            // number, nor closes it, since it is not dropped.
            let mut target = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(*number) });
            // The copy that dup2 makes is not closed at exec.
            rustix::io::dup2(copy, &mut target)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only dup2 is called, which is async-signal-safe; no memory is allocated.
    unsafe { command.pre_exec(place) };
    Ok(())
}

/// What a postmaster is told on its command line that inherits descriptors: it is that of a clone whose files are
/// filled when they are accessed. From PostgreSQL 18 on others read for a back end, unless they are told not to: a few
/// workers, in which all back ends would wait for what one of them lacks, or io_uring, whose reads nobody can be asked
/// about when who fills the files has died. Its next start without descriptors has the method that is configured, but
/// for `pg_ctl restart`: that takes the command line of before from `postmaster.opts`.
pub(crate) fn arguments(descriptors: &[InheritedDescriptor], major_version: u32) -> Vec<String> {
    if descriptors.is_empty() || major_version < IO_METHOD_VERSION_MIN {
        return Vec::new();
    }
    let mut settings = Settings::new();
    settings.set("io_method", "sync");
    settings.iter().flat_map(|(name, value)| ["-c".to_owned(), format!("{name}={value}")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Seek, Write};

    fn file_with(content: &str) -> Arc<OwnedFd> {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(content.as_bytes()).and_then(|()| file.rewind()).expect("written");
        Arc::new(file.into())
    }

    #[test]
    fn a_child_finds_each_under_its_number() {
        // The numbers are crossed on purpose: each lies where the other shall go.
        let (first, second) = (file_with("first"), file_with("second"));
        let number = |descriptor: &Arc<OwnedFd>| std::os::fd::AsRawFd::as_raw_fd(descriptor);
        let crossed = [
            InheritedDescriptor { descriptor: first.clone(), number: number(&second) },
            InheritedDescriptor { descriptor: second.clone(), number: number(&first) },
        ];
        let mut command = Command::new("sh");
        let script = format!("cat <&{}; echo; cat <&{}", number(&second), number(&first));
        command.args(["-c", &script]);
        hand_down(&mut command, &crossed).expect("prepared");
        let output = command.output().expect("runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "first\nsecond", "{output:?}");
        // Here nothing has moved.
        let again = File::from(first.try_clone().expect("open"));
        assert_eq!(again.metadata().expect("a file").len(), 5);
    }

    #[test]
    fn a_postmaster_of_18_that_inherits_reads_by_itself() {
        let inherited = [InheritedDescriptor { descriptor: file_with(""), number: 873 }];
        assert_eq!(arguments(&inherited, 18), ["-c", "io_method=sync"]);
        assert!(arguments(&inherited, 17).is_empty(), "it would not start: it knows no such setting");
        assert!(arguments(&[], 18).is_empty(), "an ordinary server has what is configured");
    }

    #[test]
    fn a_program_without_them_gets_none() {
        let secret = file_with("secret");
        let mut command = Command::new("sh");
        command.args(["-c", "ls -l /proc/self/fd/873"]);
        hand_down(&mut command, &[]).expect("nothing to prepare");
        assert!(!command.output().expect("runs").status.success());
        drop(secret);
    }
}
