//! Virtual machines: QEMU as it is, the guest's image, and servers in guests.

mod guest_server;
mod hypervisor;
mod image;
mod image_build;
mod networks;
