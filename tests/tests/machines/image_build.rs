//! The image's build: the same bytes from the same inputs, nothing half, and words that help.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_tests::guest::{IMAGE, Image};
use rustix::process::{Pid, Signal, kill_process_group};

/// How long a build of what is loaded already may take on a busy machine.
const BUILD_TIMEOUT: Duration = Duration::from_secs(300);

/// A place of its own for images, with the packages that are loaded already; the agent is a script of ours.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new(agent: &str) -> anyhow::Result<Place> {
        let image = Image::find(IMAGE)?.root();
        let images = image.ancestors().nth(2).context("images lie in a directory")?;
        let directory = tempfile::Builder::new().prefix("test-").tempdir_in(images)?;
        fs::create_dir_all(directory.path().join("packages"))?;
        for part in [format!("packages/{IMAGE}"), "tools".to_owned()] {
            // Links, not copies: the build only reads them.
            let from = images.join(&part);
            if from.exists() {
                let copied = Command::new("cp").arg("-al").arg(&from).arg(directory.path().join(&part)).status()?;
                ensure!(copied.success(), "{} is not copied", from.display());
            }
        }
        let place = Place { directory };
        place.set_agent(agent)?;
        Ok(place)
    }

    fn set_agent(&self, text: &str) -> anyhow::Result<()> {
        fs::write(self.agent(), format!("#!/bin/dash\n{text}\n"))?;
        Ok(fs::set_permissions(self.agent(), fs::Permissions::from_mode(0o755))?)
    }

    fn agent(&self) -> PathBuf {
        self.directory.path().join("agent")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = build();
        command.arg("--directory").arg(self.directory.path()).arg("--agent").arg(self.agent()).args(arguments);
        command
    }

    /// Where the image's name leads now.
    fn current(&self) -> PathBuf {
        self.directory.path().join(IMAGE).canonicalize().expect("an image was built")
    }

    /// Working directories of builds.
    fn works(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory.path()).expect("the test's own directory can be read");
        let paths = entries.flatten().map(|entry| entry.path());
        paths.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".work"))).collect()
    }
}

fn build() -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/build-image.sh"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn succeeded(command: &mut Command) -> String {
    let output = command.output().expect("the script is there");
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

/// The same loaded packages, files and tools make the same image, byte for byte; what has not changed is not built
/// again, and a newer image never changes one that somebody boots.
///
/// Spec: A7, nightly
#[test]
fn v10_the_same_inputs_make_the_same_bytes() {
    let place = Place::new("sleep 1").unwrap();
    let said = succeeded(&mut place.command(&["--verify"]));
    assert!(said.contains("two builds are the same"), "{said}");
    let first = place.current();
    // What has not changed is not built again.
    let said = succeeded(&mut place.command(&[]));
    assert!(!said.contains("built in") && place.current() == first, "{said}");
}

/// A build that is killed leaves no half image; one that cannot be says what to do.
///
/// Spec: A7, nightly
#[test]
fn v18_a_build_that_is_killed_leaves_no_half_image() {
    use std::os::unix::process::CommandExt;
    let place = Place::new("sleep 1").unwrap();
    succeeded(&mut place.command(&[]));
    let first = place.current();
    place.set_agent("sleep 2").unwrap();
    // However late it is killed, it has not come to its end: it stands where its image has to be on the disk.
    let gate = place.directory.path().join("gate");
    fs::create_dir(&gate).unwrap();
    fs::write(gate.join("sync"), "#!/bin/dash\nexec sleep 1000\n").unwrap();
    fs::set_permissions(gate.join("sync"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", gate.display(), std::env::var("PATH").unwrap());
    let mut command = place.command(&[]);
    command.env("PATH", path).process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
    let mut killed = command.spawn().unwrap();
    let deadline = Instant::now() + BUILD_TIMEOUT;
    // As soon as it has begun to make the file system.
    let begun = || place.works().iter().any(|work| work.join("image/root.img").exists());
    while !begun() && killed.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process_group(Pid::from_child(&killed), Signal::KILL).unwrap();
    killed.wait().unwrap();
    assert_eq!(place.current(), first, "it was not killed in time, or the old image is not what its name leads to");

    // Another agent is another image.
    succeeded(&mut place.command(&[]));
    assert_ne!(place.current(), first);
    assert!(first.join("manifest.toml").exists(), "the image that somebody may boot is gone");
    assert_eq!(place.works(), Vec::<PathBuf>::new());
}

/// Spec: A7
#[test]
fn v18_a_build_that_cannot_be_says_what_to_do() {
    let refused = |command: &mut Command, words: &[&str]| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        for word in words {
            assert!(text(&output).contains(word), "{word} is not in: {}", text(&output));
        }
    };
    refused(build().args(["--agent", "/no/such/agent"]), &["/no/such/agent", "make build"]);
    let place = Place::new("sleep 1").unwrap();
    refused(place.command(&[]).args(["--directory", "/proc/1/fd/x"]), &["/proc/1/fd/x", "ONECOPY_GUEST_DIRECTORY"]);
    refused(place.command(&[]).args(["--postgresql", "9"]), &["15 or 17"]);
    refused(place.command(&[]).args(["--package", "a;reboot"]), &["no name of a package"]);
    refused(&mut place.command(&["--what"]), &["--postgresql 15|17"]);
}
