//! The tap interface of a machine. It is there as long as some process has its descriptor.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::NetworkError;

const DEVICE: &str = "/dev/net/tun";

/// The kernel's table of interfaces, of this thread's namespace; proc_pid_net(5).
const INTERFACES: &str = "/proc/thread-self/net/dev";

/// Source: Linux, `include/uapi/linux/sockios.h`.
const SIOCBRADDIF: libc::Ioctl = 0x89a2;

/// A tap interface without a head before each frame, and a new one. They are the lower half of a word.
const NEW_TAP: u16 = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL) as u16;

/// How long an interface may take to go when nobody has its descriptor any more. One that is there still is another's.
const GOING_MAX: Duration = Duration::from_millis(if cfg!(test) { 1000 } else { 5000 });

const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Switched on.
const UP: libc::c_short = libc::IFF_UP as libc::c_short;

/// A tap interface.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
}

/// Whether an interface can have this name. Source: Linux, `dev_valid_name`.
///
/// # Errors
/// [`NetworkError::InterfaceName`].
pub fn check_name(name: &str) -> Result<(), NetworkError> {
    let is_possible = (1..libc::IFNAMSIZ).contains(&name.len())
        && !matches!(name, "." | "..")
        && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
    match is_possible {
        true => Ok(()),
        false => Err(NetworkError::InterfaceName { name: name.to_owned() }),
    }
}

/// A request about the interface of this name, which was checked.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: all of the structure is numbers and pointers that nobody reads yet, for which zero is one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Asks the kernel about an interface, ioctl(2).
fn ask(of: BorrowedFd<'_>, what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: each request that is made here reads and writes an `ifreq`, which lives.
    match unsafe { libc::ioctl(of.as_raw_fd(), what, std::ptr::from_mut(request)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A socket by which interfaces of this namespace are asked for.
fn socket() -> Result<OwnedFd, NetworkError> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    socket.map_err(|error| NetworkError::io("make", "a socket")(error.into()))
}

/// The number of an interface of this namespace.
fn index(socket: &OwnedFd, name: &str) -> io::Result<i32> {
    let mut asked = request(name);
    ask(socket.as_fd(), libc::SIOCGIFINDEX, &mut asked)?;
    // SAFETY: this request fills in the number.
    Ok(unsafe { asked.ifr_ifru.ifru_ifindex })
}

/// Whether there is such a bridge in this namespace. Who may plug nothing in is told that an interface is one.
///
/// # Errors
/// [`NetworkError::NoBridge`], [`NetworkError::NotABridge`], [`NetworkError::InterfaceName`], [`NetworkError::Io`].
pub fn check_bridge(bridge: &str) -> Result<(), NetworkError> {
    check_name(bridge)?;
    let socket = socket()?;
    index(&socket, bridge).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => NetworkError::NoBridge { bridge: bridge.to_owned() },
        _ => NetworkError::io("look for the bridge", bridge)(error),
    })?;
    // Plugs nothing in: a bridge says that there is no interface 0 (EINVAL). Source: Linux, `net/bridge/br_ioctl.c`,
    // and `dev_ifsioc` for what is no bridge.
    let mut nothing = request(bridge);
    nothing.ifr_ifru.ifru_ifindex = 0;
    match ask(socket.as_fd(), SIOCBRADDIF, &mut nothing) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Err(NetworkError::NotABridge { name: bridge.to_owned() })
        }
        Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => {
            Err(NetworkError::io("look at the bridge", bridge)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

impl Tap {
    /// Makes a new interface in this namespace, plugs it into a bridge there, and switches it on. It goes when no
    /// process has its descriptor. One of this name that goes just now is waited for: the kernel takes it away some
    /// time after the death of who had it.
    ///
    /// # Errors
    /// [`NetworkError::NoBridge`], [`NetworkError::InterfaceName`], [`NetworkError::Io`]: this is not root, or somebody
    /// else has an interface of this name.
    pub fn create(name: &str, bridge: &str) -> Result<Tap, NetworkError> {
        check_name(name)?;
        check_bridge(bridge)?;
        let socket = socket()?;
        let open = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let file = open.map_err(NetworkError::io("open", DEVICE))?;
        let mut made = request(name);
        made.ifr_ifru.ifru_flags = NEW_TAP.cast_signed();
        let begun = Instant::now();
        while let Err(error) = ask(file.as_fd(), libc::TUNSETIFF, &mut made) {
            let is_taken = error.raw_os_error() == Some(libc::EBUSY);
            if !is_taken || begun.elapsed() > GOING_MAX {
                return Err(NetworkError::io("make the interface", name)(error));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        // Its own side speaks no IPv6: nobody is there. Where it cannot be said, it only makes noise.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        let mut plugged = request(bridge);
        plugged.ifr_ifru.ifru_ifindex =
            index(&socket, name).map_err(NetworkError::io("look for the interface", name))?;
        ask(socket.as_fd(), SIOCBRADDIF, &mut plugged)
            .map_err(NetworkError::io("plug an interface into the bridge", bridge))?;
        let mut flags = request(name);
        ask(socket.as_fd(), libc::SIOCGIFFLAGS, &mut flags).map_err(NetworkError::io("look at the interface", name))?;
        // SAFETY: that request has filled in the flags.
        let found = unsafe { flags.ifr_ifru.ifru_flags };
        flags.ifr_ifru.ifru_flags = found | UP;
        ask(socket.as_fd(), libc::SIOCSIFFLAGS, &mut flags).map_err(NetworkError::io("switch on", name))?;
        Ok(Tap { file, name: name.to_owned() })
    }

    /// One that another process has made. This thread goes to the namespace in which it is.
    ///
    /// # Errors
    /// [`NetworkError::Io`]: it is none, or is gone.
    pub fn adopt(descriptor: OwnedFd) -> Result<Tap, NetworkError> {
        let file = File::from(descriptor);
        // SAFETY: this request takes no argument and returns a new descriptor, or -1.
        let space = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETDEVNETNS) };
        if space < 0 {
            return Err(NetworkError::io("find the namespace of", "an interface")(io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just opened it for nobody but this.
        let space = unsafe { OwnedFd::from_raw_fd(space) };
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| NetworkError::io("enter the namespace of", "an interface")(error.into()))?;
        let mut asked = request("");
        ask(file.as_fd(), libc::TUNGETIFF, &mut asked).map_err(NetworkError::io("look at", "an interface"))?;
        let bytes: Vec<u8> = asked.ifr_name.iter().map(|byte| byte.cast_unsigned()).chain([0]).collect();
        let name = CStr::from_bytes_until_nul(&bytes).map(|name| name.to_string_lossy().into_owned());
        Ok(Tap { file, name: name.unwrap_or_default() })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor, for who keeps it.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// The next frame for the machine, and its length.
    pub(crate) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(into)
    }

    /// Hands a frame of the machine to the kernel: all of it, or nothing.
    pub(crate) fn write(&self, frame: &[u8]) -> io::Result<()> {
        (&self.file).write(frame).map(|_| ())
    }

    /// Frames that were written to it since it is there, by whomever.
    pub(crate) fn written(&self) -> Result<u64, NetworkError> {
        let table = std::fs::read_to_string(INTERFACES).map_err(NetworkError::io("read", INTERFACES))?;
        written_in(&table, &self.name)
            .ok_or_else(|| NetworkError::io("find the count of", &self.name)(ErrorKind::NotFound.into()))
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Bytes and packets received come first: what is written to a tap interface it has received.
fn written_in(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_interface_can_be_called_is_refused() {
        for name in ["", ".", "..", "a/b", "a b", "a:b", "a%d", "sixteen-letters-", "ä"] {
            assert!(matches!(check_name(name), Err(NetworkError::InterfaceName { .. })), "{name}");
        }
        for name in ["br0", "fifteen-letters"] {
            check_name(name).unwrap();
        }
    }

    /// As root: others are told that it is one.
    #[test]
    fn what_is_no_bridge_is_refused_before_anything_is_plugged_in() {
        assert!(matches!(check_bridge("none-of-these"), Err(NetworkError::NoBridge { .. })));
        let refused = check_bridge("lo");
        match rustix::process::geteuid().is_root() {
            true => assert!(matches!(refused, Err(NetworkError::NotABridge { .. })), "{refused:?}"),
            false => refused.unwrap(),
        }
    }

    #[test]
    fn the_count_of_an_interface_is_found_in_the_kernels_table() {
        let table = "Inter-| Receive\n face |bytes packets\n  br0: 1 2 3\noc0: 90 7 0 0\n oc01:10 8 0\n";
        assert_eq!(written_in(table, "oc0"), Some(7));
        assert_eq!(written_in(table, "oc01"), Some(8));
        assert_eq!(written_in(table, "oc"), None);
        assert_eq!(written_in("oc0: x", "oc0"), None);
    }
}
