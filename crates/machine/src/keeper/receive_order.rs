//! What another host is asked for that shall take a machine.

use onecopy_clone::network::client::Stream;

use super::MigrationOrder;
use crate::migration::{self, Departure, HostOrder, ReceiveOrder};
use crate::{GuestImage, MachineError, MachineHome};

/// The order for a machine, without its disk.
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
        shared_disk: None,
    })
}

/// Orders the other host to take the machine. One that knows nothing of shared storage is asked without.
pub(super) async fn send(order: &MigrationOrder, receive: ReceiveOrder) -> Result<Box<dyn Stream>, String> {
    let ask = async |receive: &ReceiveOrder| {
        migration::open(&order.to, &order.keys, &HostOrder::Receive(Box::new(receive.clone()))).await
    };
    match ask(&receive).await {
        Err(reason) if receive.shared_disk.is_some() && reason.contains("shared_disk") => {
            ask(&ReceiveOrder { shared_disk: None, ..receive }).await
        }
        opened => opened,
    }
}
