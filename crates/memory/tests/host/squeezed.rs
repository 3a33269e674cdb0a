//! Processes in a cgroup of their own on the real host; both are gone afterwards, also when the test fails.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use onecopy_memory::InstanceName;
use onecopy_memory::cgroup::InstanceGroup;
use onecopy_memory::pressure::Host;
use onecopy_testing::skip;
use rustix::process::{Pid, Signal, kill_process_group};

pub const MIB: u64 = 1 << 20;

/// This host; none where the test cannot run.
pub fn host(test: &str) -> Option<Arc<Host>> {
    let host = Arc::new(Host::new().expect("the kernel's files can be read"));
    if host.hierarchy().is_none() || !rustix::process::geteuid().is_root() {
        skip(test, "it needs root and cgroups with the controller for memory");
        return None;
    }
    Some(host)
}

/// A name that no other test has.
pub fn name(test: &str) -> InstanceName {
    format!("test-{}-{test}", std::process::id()).parse().expect("a name")
}

/// A shell and what it starts. It begins when it is told so.
pub struct Family {
    shell: Child,
}

impl Family {
    pub fn waiting(script: &str) -> Family {
        let script = format!("read go; {script}");
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        Family { shell: command.spawn().expect("a shell starts") }
    }

    pub fn pid(&self) -> u32 {
        self.shell.id()
    }

    pub fn go(&mut self) {
        let stdin = self.shell.stdin.as_mut().expect("it was asked for");
        stdin.write_all(b"go\n").expect("the shell reads");
    }

    /// Ends when the shell does.
    pub fn wait(&mut self) {
        self.shell.wait().expect("it is a child");
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.shell);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.shell.wait();
    }
}

/// A cgroup that is removed at the end of its test.
pub struct Group(Option<InstanceGroup>);

impl Group {
    /// Directly below the file system's root: the cgroup of the test itself is left alone.
    pub fn new(host: &Arc<Host>, test: &str) -> Group {
        Group::below(host, &host.hierarchy().expect("it was looked for").mount_point, test)
    }

    pub fn below(host: &Arc<Host>, parent: &Path, test: &str) -> Group {
        Group(Some(InstanceGroup::create(host, parent, &name(test)).expect("root may make cgroups")))
    }

    pub fn get(&mut self) -> &mut InstanceGroup {
        self.0.as_mut().expect("it is there until the end")
    }

    pub fn remove(mut self) {
        self.0.take().expect("it is there until the end").remove().expect("its processes may go home");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0.take() {
            let _ = group.remove();
        }
    }
}
