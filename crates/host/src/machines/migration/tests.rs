//! What the records of migrations allow.

use std::fs;
use std::path::Path;

use onecopy_machine::migration::{ReceiveOrder, SharedDisk};
use onecopy_machine::{BridgedNetwork, GuestImage, MachineConfiguration, NetworkChoice};

use super::*;
use crate::machines::AllowedBridge;

#[test]
fn who_is_not_given_away_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    let home = MachineHome::of(&machines.directory.machines(), &"web".parse().unwrap());
    fs::create_dir_all(home.root()).unwrap();
    fs::write(home.configuration_file(), "").unwrap();
    let which = Which { name: "web".parse().unwrap(), token: "t".to_owned() };
    assert!(machines.given_snapshot(&which).unwrap_err().to_string().contains("not given away"));
    let departure = Departure {
        token: "t".to_owned(),
        to: "h:1".to_owned(),
        keys: "/k".into(),
        disk: "disk".to_owned(),
        snapshot: "s".to_owned(),
        state: DepartureState::Begun,
        is_whole: false,
        result: None,
        protects: false,
        fences: false,
        etcd: Vec::new(),
    };
    departure.write(&home).unwrap();
    machines.given_snapshot(&which).unwrap_err();
    fs::write(home.root().join("standing.json"), r#"{"standing":"migrated","generation":0}"#).unwrap();
    assert_eq!(machines.given_snapshot(&which).unwrap().1, departure);
    let other = Which { token: "other".to_owned(), ..which };
    machines.given_snapshot(&other).unwrap_err();
}

#[test]
fn a_disk_is_shared_only_where_this_host_was_told_so() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("storage/web/disk");
    let other = directory.path().join("other/web/disk");
    for path in [&disk, &other] {
        fs::create_dir_all(path).unwrap();
    }
    std::os::unix::fs::symlink(&other, directory.path().join("storage/planted")).unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    let storage = directory.path().join("storage");
    let sharing = machines.clone().with_shared_storage(&[directory.path().join("storage")]).unwrap();
    let of = |directory: &Path| SharedDisk {
        directory: directory.to_owned(),
        begun: "migration-1-2-begun".to_owned(),
        last: "migration-1-2".to_owned(),
        beneath: "/".into(),
    };
    let web: MachineName = "web".parse().unwrap();
    let shared = |machines: &Machines, directory: &Path| machines.shared(&web, &of(directory));
    assert_eq!(shared(&sharing, &disk).unwrap().directory, disk.canonicalize().unwrap());
    assert_eq!(shared(&sharing, &disk).unwrap().beneath, storage.canonicalize().unwrap(), "whatever it says");
    assert_eq!(shared(&machines, &disk), None);
    assert_eq!(sharing.shared(&"other".parse().unwrap(), &of(&disk)), None, "another machine's");
    for (begun, last) in [("checkpoint-1-2", "migration-1-2"), ("a-begun", "a"), ("migration-1-2", "migration-1-2")] {
        let named = SharedDisk { begun: begun.to_owned(), last: last.to_owned(), ..of(&disk) };
        assert_eq!(sharing.shared(&web, &named), None, "{begun} {last}");
    }
    let own = machines.directory.machines();
    fs::create_dir_all(own.join("web/disk")).unwrap();
    let all = machines.clone().with_shared_storage(&[directory.path().to_owned()]).unwrap();
    assert_eq!(shared(&all, &own.join("web/disk")), None, "one of its own");
    for refused in [&other, &storage.join("planted"), &storage.join("../other/web/disk"), &storage.join("none")] {
        assert_eq!(shared(&sharing, refused), None, "{}", refused.display());
    }
    machines.with_shared_storage(&[directory.path().join("none")]).unwrap_err();
}

fn bridged(text: &str) -> BridgedNetwork {
    match text.parse().unwrap() {
        NetworkChoice::Bridged(network) => network,
        NetworkChoice::User => panic!("{text} is QEMU's own"),
    }
}

#[test]
fn a_machine_comes_onto_a_bridge_that_was_named_and_unfiltered_only_where_that_was_said() {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    let refusal = |allowed: &[&str], network: &str| {
        let allowed: Vec<AllowedBridge> = allowed.iter().map(|text| text.parse().unwrap()).collect();
        // What is allowed is looked for next, and is not there.
        machines.clone().with_bridges(&allowed).check_allowed(&bridged(network)).unwrap_err()
    };
    let (filtered, free) = ("bridge=no-such-br", "bridge=no-such-br,filter=off");
    assert!(refusal(&[], filtered).contains("with --bridge no-such-br"));
    assert!(refusal(&["other-br"], filtered).contains("with --bridge no-such-br"));
    assert!(refusal(&["no-such-br"], filtered).contains("there is no bridge no-such-br"));
    assert!(refusal(&["no-such-br"], free).contains("with --bridge no-such-br,filter=off"));
    assert!(refusal(&["no-such-br", "no-such-br,filter=off"], free).contains("there is no bridge no-such-br"));
    for wrong in ["", "br0,bridge=br1", "br0,mac=52:54:00:00:00:07", "br0,address=192.0.2.10/24", "br0,vlan=7"] {
        wrong.parse::<AllowedBridge>().unwrap_err();
    }
}

#[test]
fn a_machine_comes_in_nobodys_place() {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    let home = MachineHome::of(&machines.directory.machines(), &"db".parse().unwrap());
    fs::create_dir_all(home.root()).unwrap();
    // Its card is made of its directory.
    let own = bridged("bridge=br0,address=192.0.2.10/24");
    let configuration = MachineConfiguration { network: Some(own.clone()), ..MachineConfiguration::new("/i".into()) };
    configuration.write(&home.configuration_file()).unwrap();
    let web: MachineName = "web".parse().unwrap();
    let check = |network: &str| machines.check_nobodys(&web, &bridged(network));
    let card = own.card(home.root());
    let refused = check(&format!("bridge=br0,mac={card},address=192.0.2.11/24")).unwrap_err();
    assert!(refused.contains("db has its card or address"), "{refused}");
    check("bridge=br0,mac=52:54:00:00:00:07,address=192.0.2.10/16").unwrap_err();
    check("bridge=br0,mac=52:54:00:00:00:07,address=192.0.2.11/24").unwrap();
    check("bridge=br0").unwrap();
    check(&format!("bridge=br1,mac={card},address=192.0.2.10/24")).unwrap();
    // One that has gone has left its place.
    fs::write(home.root().join("standing.json"), r#"{"standing":"migrated","generation":0}"#).unwrap();
    check(&format!("bridge=br0,mac={card}")).unwrap();
}

/// One that another host sends, which boots with this.
fn order(image: &str) -> ReceiveOrder {
    ReceiveOrder {
        which: Which { name: "web".parse().unwrap(), token: "0".repeat(32) },
        origin: "h:1".to_owned(),
        memory_bytes: 256 << 20,
        processors: 1,
        disk_bytes: 4 << 30,
        postgresql: false,
        password: None,
        guest_ports: Vec::new(),
        image: image.to_owned(),
        silent_after_s: 60,
        end_when_silent: false,
        network: None,
        shared_disk: None,
        protects: false,
        detection_s: None,
        compares_disk: false,
        came_by: None,
        secret: None,
        asks_etcd: false,
    }
}

/// Who comes waits for who makes one, and looks again then.
///
/// Spec: A7
#[tokio::test]
async fn a_machine_that_is_made_while_another_of_its_name_comes_stays() {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    machines.directory.make_machines().unwrap();
    let home = MachineHome::of(&machines.directory.machines(), &"web".parse().unwrap());
    let made = MachineConfiguration::new("/i".into());
    let order = order(&GuestImage::find(None).expect("`make guest` has made one").boot_digest().unwrap());
    let ports = machines.lock_ports().await.unwrap();
    let making = async {
        fs::create_dir(home.root()).unwrap();
        made.write(&home.configuration_file()).unwrap();
        drop(ports);
    };
    // In this order: it has seen that there is none.
    let (came, ()) = tokio::join!(machines.make_arriving(&order, Path::new("/k")), making);
    let refusal = came.unwrap_err();
    assert!(matches!(refusal, HostError::Machine(MachineError::Exists { .. })), "{refusal}");
    assert_eq!(home.configuration().unwrap(), made);
}

#[tokio::test]
async fn a_copy_that_is_to_wait_longer_than_a_fence_allows_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let machines = Machines::of(crate::Directory::new(directory.path()).unwrap()).unwrap();
    let order = ReceiveOrder { protects: true, detection_s: Some(60), ..order("none") };
    let refusal = machines.make_arriving(&order, Path::new("/k")).await.unwrap_err().to_string();
    assert!(refusal.contains("give 2 to 15"), "{refusal}");
}
