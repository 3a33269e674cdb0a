//! What another host is asked for that shall take a machine.

use onecopy_clone::network::client::Stream;

use super::MigrationOrder;
use super::state::Keeper;
use super::words;
use crate::migration::{self, Departure, HostOrder, ReceiveOrder};
use crate::network_holder::is_to_hold;
use crate::{BridgedNetwork, GuestImage, MachineConfiguration, MachineError, MachineHome};

/// Why a machine stays whose frames wait.
pub(super) const HELD: &str = "what it sends is held until somebody releases it, and would be lost";

/// The order for a machine, without its disk and its network.
pub(super) fn of(
    home: &MachineHome,
    order: &MigrationOrder,
    departure: &Departure,
) -> Result<ReceiveOrder, MachineError> {
    let image = GuestImage::find(Some(&home.image()))?;
    let configuration = home.configuration()?;
    let password = std::fs::read_to_string(home.password_file()).ok().map(|text| text.trim().to_owned());
    Ok(ReceiveOrder {
        which: departure.which(home),
        origin: order.origin.clone(),
        memory_bytes: configuration.memory_bytes,
        processors: configuration.processors,
        disk_bytes: configuration.disk_bytes,
        postgresql: configuration.postgresql,
        password,
        guest_ports: configuration.forwards.iter().map(|forward| forward.guest_port).collect(),
        image: image.boot_digest().map_err(MachineError::file("read", image.directory.clone()))?,
        silent_after_s: configuration.silent_after_s,
        end_when_silent: configuration.end_when_silent,
        network: None,
        shared_disk: None,
        protects: departure.protects,
        detection_s: None,
        compares_disk: false,
        came_by: None,
        secret: None,
        asks_etcd: false,
    })
}

/// The card of a machine on a bridge as it is on the other host: the same one, with its addresses.
pub(super) fn network(
    keeper: &Keeper,
    configuration: &MachineConfiguration,
    order: &MigrationOrder,
) -> Result<Option<BridgedNetwork>, String> {
    let home = keeper.home();
    if let Some(failure) = keeper.network_failure() {
        return Err(format!("its guest has not got its identity: {failure}"));
    }
    let Some(network) = &configuration.network else {
        return match &order.bridge {
            Some(bridge) => {
                Err(format!("it is on no bridge here, and comes to none there: leave out --bridge {bridge}"))
            }
            None => Ok(None),
        };
    };
    if is_to_hold(home) {
        return Err(HELD.to_owned());
    }
    let bridge = order.bridge.clone().unwrap_or_else(|| network.bridge.clone());
    let there = BridgedNetwork { bridge, mac: Some(network.card(home.root())), ..network.clone() };
    there.check()?;
    Ok(Some(there))
}

/// Orders the other host to take the machine. One that knows nothing of shared storage, or of what it may leave out, is
/// asked without.
pub(super) async fn send(
    home: &MachineHome,
    order: &MigrationOrder,
    receive: ReceiveOrder,
) -> Result<Box<dyn Stream>, String> {
    let came_by = receive.compares_disk.then(|| migration::came_by(home)).transpose().unwrap_or_else(|error| {
        tracing::warn!(%error, "the disk that the machine had there travels");
        None
    });
    let came_by = came_by.flatten();
    let secret = Some(migration::renew_secret(home).map_err(words)?);
    let mut receive = ReceiveOrder { came_by, secret, ..receive };
    let opened = loop {
        let asked = HostOrder::Receive(Box::new(receive.clone()));
        let opened = migration::open(&order.to, &order.keys, &asked).await;
        let are_unknown =
            |fields: &[&str]| opened.as_ref().is_err_and(|reason| fields.iter().any(|field| is_unknown(reason, field)));
        if receive.shared_disk.is_some() && are_unknown(&["shared_disk"]) {
            receive.shared_disk = None;
        } else if receive.secret.is_some() && are_unknown(&["compares_disk", "came_by", "secret"]) {
            (receive.compares_disk, receive.came_by, receive.secret) = (false, None, None);
        } else {
            break opened;
        }
    };
    opened.map_err(|reason| {
        let unknown = [
            ("network", "a machine on a bridge"),
            ("protects", "protection"),
            ("detection_s", "another time of detection than five seconds"),
        ];
        match unknown.iter().find(|(field, _)| is_unknown(&reason, field)) {
            Some((_, what)) => format!("its onecopy is too old for {what}: {reason}"),
            None => reason,
        }
    })
}

/// Whether an earlier build has refused a field that it does not know.
fn is_unknown(reason: &str, field: &str) -> bool {
    reason.contains(&format!("unknown field `{field}`"))
}
