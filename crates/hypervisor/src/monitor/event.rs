//! What QEMU tells by itself (<https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html>).

use serde_json::Value;

/// Something has happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// QEMU's clock, microseconds since 1970.
    pub unix_us: i64,
    /// What.
    pub kind: EventKind,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum EventKind {
    /// `SHUTDOWN`: the machine ends, or stops where that is configured.
    Shutdown {
        /// The guest has asked for it.
        guest: bool,
        /// QEMU's word for why, such as `guest-shutdown`, `host-qmp-quit`, `guest-panic`, `host-signal`.
        reason: String,
    },
    /// `POWERDOWN`: the button was pressed.
    PowerDown,
    /// `RESET`.
    Reset {
        /// The guest has asked for it.
        guest: bool,
    },
    /// `STOP`: the processors stand.
    Stop,
    /// `RESUME`: they run.
    Resume,
    /// `GUEST_PANICKED`: its kernel has said so.
    GuestPanicked {
        /// What QEMU does about it: `pause`, `poweroff`, `run`.
        action: String,
    },
    /// `MIGRATION`: a migration's new status.
    Migration {
        /// QEMU's word.
        status: String,
    },
    /// `MIGRATION_PASS`: all memory is gone through once more.
    MigrationPass {
        /// Which pass begins.
        pass: u64,
    },
    /// `DEVICE_DELETED`: the guest has let go of it.
    DeviceDeleted {
        /// The device's id, if it had one.
        device: Option<String>,
    },
    /// `VSERPORT_CHANGE`: a program of the guest has opened or closed a port.
    SerialPort {
        /// The port's device.
        id: String,
        /// It is open.
        open: bool,
    },
    /// `BALLOON_CHANGE`.
    Balloon {
        /// What the guest has now, bytes.
        actual_bytes: u64,
    },
    /// `BLOCK_IO_ERROR`.
    BlockError {
        /// The block device or node.
        device: String,
        /// The error's text.
        reason: String,
    },
    /// Anything else.
    Other {
        /// QEMU's name.
        name: String,
        /// What comes with it.
        data: Value,
    },
}

impl Event {
    /// The event in a message of the monitor; none when it is none.
    pub(super) fn of_message(message: &Value) -> Option<Event> {
        let name = message.get("event")?.as_str()?;
        let clock = |unit| message.pointer(&format!("/timestamp/{unit}")).and_then(Value::as_i64).unwrap_or_default();
        let unix_us = clock("seconds").saturating_mul(1_000_000).saturating_add(clock("microseconds"));
        Some(Event { unix_us, kind: kind(name, message.get("data").unwrap_or(&Value::Null)) })
    }
}

fn kind(name: &str, data: &Value) -> EventKind {
    let text = |key| data.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = |key| data.get(key).and_then(Value::as_u64).unwrap_or_default();
    let flag = |key| data.get(key).and_then(Value::as_bool).unwrap_or_default();
    match name {
        "SHUTDOWN" => EventKind::Shutdown { guest: flag("guest"), reason: text("reason") },
        "POWERDOWN" => EventKind::PowerDown,
        "RESET" => EventKind::Reset { guest: flag("guest") },
        "STOP" => EventKind::Stop,
        "RESUME" => EventKind::Resume,
        "GUEST_PANICKED" => EventKind::GuestPanicked { action: text("action") },
        "MIGRATION" => EventKind::Migration { status: text("status") },
        "MIGRATION_PASS" => EventKind::MigrationPass { pass: number("pass") },
        "DEVICE_DELETED" => {
            EventKind::DeviceDeleted { device: data.get("device").and_then(Value::as_str).map(str::to_owned) }
        }
        "VSERPORT_CHANGE" => EventKind::SerialPort { id: text("id"), open: flag("open") },
        "BALLOON_CHANGE" => EventKind::Balloon { actual_bytes: number("actual") },
        "BLOCK_IO_ERROR" => EventKind::BlockError { device: text("device"), reason: text("reason") },
        _ => EventKind::Other { name: name.to_owned(), data: data.clone() },
    }
}
