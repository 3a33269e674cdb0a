//! Whether KVM can be used: a device that is there does not say that ordinary guests run.

use std::fs::OpenOptions;
use std::path::Path;

/// KVM's device.
pub(crate) const KVM_DEVICE: &str = "/dev/kvm";
/// The modules that let the processor run guests. Others (`kvm_pvm`) offer the same device for guests that are made for
/// them: a usual kernel does not come up there.
const HARDWARE_MODULES: [&str; 2] = ["/sys/module/kvm_intel", "/sys/module/kvm_amd"];

/// KVM runs ordinary guests here: the device opens for this process, and the processor's own virtualization is behind
/// it.
pub fn kvm_runs_guests() -> bool {
    HARDWARE_MODULES.iter().any(|module| Path::new(module).exists())
        && OpenOptions::new().read(true).write(true).open(KVM_DEVICE).is_ok()
}
