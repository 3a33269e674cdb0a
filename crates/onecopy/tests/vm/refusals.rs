//! What is refused, with which words and which exit code; no guest runs.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::machines::MachineDirectory;

/// The files of an image; nobody boots them.
fn image(directory: &Path) -> PathBuf {
    let image = directory.join("image");
    std::fs::create_dir(&image).expect("make the directory");
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o755)).expect("set the mode");
    for (name, content) in [("vmlinuz", "kernel"), ("initrd", "files"), ("manifest.toml", "postgresql = 17\n")] {
        std::fs::write(image.join(name), content).expect("write");
    }
    let root = std::fs::File::create(image.join("root.img")).expect("make the file");
    root.set_len(64 << 20).expect("make it long");
    image
}

/// A directory for machines, and an image beside it.
fn directory_and_image() -> (MachineDirectory, String) {
    let machines = MachineDirectory::new();
    let image = image(machines.path().parent().expect("a directory above"));
    (machines, format!("--image={}", image.display()))
}

/// Wishes that no machine can fulfil (name, image, memory, processors, disk, ports, no QEMU) are refused with the
/// option or remedy, and nothing is made.
///
/// Spec: L4
#[test]
fn v20_bad_wishes_are_refused_and_nothing_is_made() {
    let (machines, image) = directory_and_image();
    let cases: [(&[&str], i32, &str); 13] = [
        (&["Web", &image], 1, "no name of a machine"),
        (&["../web", &image], 1, "no name of a machine"),
        (&["follower-7", &image], 1, "a cluster gives"),
        (&["web", "--image=/nonexistent"], 1, "build-image.sh"),
        (&["web", &image, "--memory=16MB"], 1, "--memory"),
        (&["web", &image, "--memory=lots"], 2, "does not begin with a number"),
        (&["web", &image, "--processors=0"], 1, "--processors"),
        (&["web", &image, "--disk=1000B"], 1, "--disk"),
        (&["web", &image, "--disk=32MB"], 1, "does not hold the image"),
        (&["web", &image, "--disk=10000PB"], 1, "not possible"),
        (&["web", &image, "--forward=80"], 2, "HOST:GUEST"),
        (&["web", &image, "--forward=8080:80", "--forward=8080:81"], 1, "--forward"),
        (&["web"], 1, "no QEMU found"),
    ];
    for (arguments, code, words) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onecopy"));
        command.args(["vm", "create"]).args(arguments).env("ONECOPY_DIR", machines.path());
        if words == "no QEMU found" {
            command.env("ONECOPY_QEMU", "/nonexistent/qemu").arg(&image);
        }
        let output = command.output().expect("run onecopy");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {complaint}");
        assert!(complaint.contains(words), "{arguments:?}: {complaint}");
        assert!(!machines.home("web").join("machine.toml").exists(), "{arguments:?}");
    }
}

/// A machine is made with a disk that takes only what is written and with ports of its own, is listed, and is removed
/// without a trace; one that is not there is named with those that are (exit code 3).
///
/// Spec: L4
#[test]
fn v21_a_machine_is_made_listed_and_removed_without_a_trace() {
    let (machines, image) = directory_and_image();
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    assert!(run(&["vm", "list"]).ok().contains("no machines"));
    run(&["vm", "create", "web", &image, "--forward=0:80", "--disk=1GB", "--memory=256MB"]).ok();
    run(&["vm", "create", "shop", &image, "--postgresql"]).ok();
    assert!(run(&["vm", "create", "web", &image]).refused(1).contains("vm delete web"));
    let (web, shop) = (machines.machine("web"), machines.machine("shop"));
    assert_eq!((&web["state"], &web["disk_bytes"]), (&"stopped".into(), &(1_u64 << 30).into()));
    assert_eq!((&web["of_cluster"], &shop["postgresql"]), (&false.into(), &true.into()));
    let port = |machine: &serde_json::Value| machine["forwards"][0]["host_port"].as_u64().expect("a port");
    assert_ne!(port(&web), port(&shop), "each has ports of its own");
    assert_eq!(shop["forwards"][0]["guest_port"], 5432);
    assert!(web["disk_used_bytes"].as_u64().expect("a number") < 16 << 20, "only what is written takes place: {web}");
    let password = std::fs::metadata(machines.home("shop").join("password")).expect("a password");
    assert_eq!(password.permissions().mode() & 0o777, 0o600);

    // A cluster may be made beside them; nothing else may lie there.
    let entries = |path: PathBuf| std::fs::read_dir(path).expect("read").count();
    assert_eq!(entries(machines.path().join("machines")), 2);
    for (command, code, words) in [
        (&["vm", "exec", "web", "--", "true"][..], 3, "vm start web"),
        (&["vm", "console", "web"], 3, "vm start web"),
        (&["vm", "exec", "none", "--", "true"], 3, "there are: shop, web"),
        (&["vm", "start", "none"], 3, "there are: shop, web"),
        (&["vm", "delete", "none"], 3, "there are: shop, web"),
        (&["vm", "exec", "web"], 2, "required"),
    ] {
        let complaint = run(command).refused(code);
        assert!(complaint.contains(words), "{command:?}: {complaint}");
    }
    // QEMU's account may lay a link where the console's log is: it is not followed with the rights of who looks.
    let (secret, run_directory) = (machines.path().join("secret"), machines.home("web").join("run"));
    std::fs::write(&secret, "nobody's business\n").expect("write");
    std::fs::create_dir(&run_directory).expect("make the directory");
    std::os::unix::fs::symlink(&secret, run_directory.join("console.log")).expect("link");
    let shown = run(&["vm", "console", "web"]);
    assert_eq!((shown.code, shown.stdout.as_str()), (Some(1), ""), "{}", shown.stderr);
    std::fs::remove_file(&secret).expect("remove");
    run(&["vm", "stop", "web"]).ok();
    run(&["vm", "delete", "web"]).ok();
    run(&["vm", "delete", "shop"]).ok();
    assert_eq!(entries(machines.path().join("machines")), 0);
}

/// What a cluster's servers run in is chosen once; options of machines are refused where servers are processes.
///
/// Spec: L4
#[test]
fn v22_what_a_clusters_servers_run_in_is_chosen_once() {
    let (machines, image) = directory_and_image();
    let image = image.replace("--image", "--vm-image");
    let run = |arguments: &[&str]| machines.directory.run(arguments);
    let refused = run(&["up", "--detach", "--runtime=vm", "--vm-image=/nonexistent"]).refused(1);
    assert!(refused.contains("build-image.sh") && refused.contains("--vm-image"), "{refused}");
    let refused = run(&["up", "--detach", "--runtime=vm", &image, "--vm-memory=1MB"]).refused(1);
    assert!(refused.contains("memory"), "{refused}");
    let refused = run(&["up", "--detach", "--vm-memory=1GB"]).refused(1);
    assert!(refused.contains("--runtime vm"), "{refused}");
    assert!(!machines.path().join("cluster.toml").exists());

    machines.directory.up(0);
    run(&["down"]).ok();
    let refused = run(&["up", "--detach", "--runtime=vm", &image]).refused(1);
    assert!(refused.contains("run as process, not as vm"), "{refused}");
    assert!(run(&["up", "--detach", "--vm-disk=1GB"]).refused(1).contains("--runtime vm"));
    run(&["up", "--detach", "--runtime=process"]).ok();
    assert_eq!(machines.directory.sql("SELECT 1"), "1");
    assert_eq!(machines.directory.status()["servers"][0].get("machine"), None);
}

/// A `machine.toml` that is none is refused with its place, and its disk is untouched.
///
/// Spec: C6
#[test]
fn v23_a_broken_machine_toml_is_told_with_its_place() {
    let (machines, image) = directory_and_image();
    machines.directory.run(&["vm", "create", "web", &image]).ok();
    let file = machines.home("web").join("machine.toml");
    let good = std::fs::read_to_string(&file).expect("read");
    for (text, words) in [
        (good.replace("processors = 1", "processors = 1000"), "1 to 64"),
        (good.replace("processors", "procesors"), "procesors"),
        (good.replace("format = 1", "format = 2"), "form 2"),
        ("\u{0}".to_owned(), "machine.toml"),
    ] {
        std::fs::write(&file, text).expect("write");
        let complaint = machines.directory.run(&["vm", "start", "web"]).refused(1);
        assert!(complaint.contains(words) && complaint.contains("machine.toml"), "{complaint}");
    }
    std::fs::write(&file, good).expect("write");
    assert_eq!(machines.machine("web")["state"], "stopped");
}
