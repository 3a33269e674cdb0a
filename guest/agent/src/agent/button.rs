//! The power button, which the host presses to ask for an orderly end.

use super::SwitchOff;
use std::fs::{File, read_dir, read_to_string};
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::Sender;

/// `struct input_event` on 64 bits: two words of time, then type, code and value (linux/input.h).
const EVENT_BYTES: usize = 24;
/// EV_KEY (linux/input-event-codes.h).
const KEY_EVENT: u16 = 1;
/// KEY_POWER.
const POWER_KEY: u16 = 116;
/// A key that goes down.
const PRESSED: i32 = 1;

/// Watches each power button of the machine on a thread of its own. A machine without one is switched off in other
/// ways.
pub(crate) fn watch(switch_off: &Sender<SwitchOff>) {
    let Ok(devices) = read_dir("/sys/class/input") else { return };
    for device in devices.flatten() {
        let is_button =
            read_to_string(device.path().join("device/name")).is_ok_and(|name| name.contains("Power Button"));
        if !is_button || !device.file_name().to_string_lossy().starts_with("event") {
            continue;
        }
        match File::open(Path::new("/dev/input").join(device.file_name())) {
            Ok(events) => {
                let switch_off = switch_off.clone();
                std::thread::spawn(move || follow(events, &switch_off));
            }
            Err(error) => eprintln!("onecopy-guest: opening the power button: {error}"),
        }
    }
}

fn follow(mut events: impl Read, switch_off: &Sender<SwitchOff>) {
    let mut event = [0; EVENT_BYTES];
    while events.read_exact(&mut event).is_ok() {
        if is_press(&event) {
            // Nobody receives: it is being switched off already.
            let _ = switch_off.send(SwitchOff);
        }
    }
}

fn is_press(event: &[u8; EVENT_BYTES]) -> bool {
    let kind = u16::from_ne_bytes([event[16], event[17]]);
    let code = u16::from_ne_bytes([event[18], event[19]]);
    let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
    (kind, code, value) == (KEY_EVENT, POWER_KEY, PRESSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        [&[0; 16][..], &kind.to_ne_bytes(), &code.to_ne_bytes(), &value.to_ne_bytes()].concat()
    }

    #[test]
    fn only_the_power_key_going_down_switches_off() {
        let (sender, receiver) = std::sync::mpsc::channel();
        follow(&[event(0, 0, 0), event(1, 116, 0), event(1, 30, 1)].concat()[..], &sender);
        assert!(receiver.try_recv().is_err());
        follow(&[event(1, 116, 1), event(0, 0, 0)].concat()[..], &sender);
        assert!(receiver.try_recv().is_ok());
    }
}
