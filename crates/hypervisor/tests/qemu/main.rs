//! The real QEMU, with machines that have nothing to boot: it takes our arguments, and machines live and end as their
//! states say.

mod accepted;
mod adopted;
mod bounds;
mod life;
mod machines;
mod moved;
