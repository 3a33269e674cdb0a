//! Cgroups and pressure on the real host: they need root and the controller for memory, of whichever version.

mod cgroup;
mod pressure;
mod squeezed;
