//! Bytes with open files over a Unix socket: `SCM_RIGHTS` of unix(7).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Open files in one message, at most.
pub const DESCRIPTORS_MAX: usize = 8;

/// Sends `bytes` with `descriptors`; on a stream socket perhaps only the first of the bytes, whose number is returned,
/// but all descriptors.
///
/// # Errors
/// Those of sendmsg(2); more than [`DESCRIPTORS_MAX`] descriptors are refused.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty()
        && (descriptors.len() > DESCRIPTORS_MAX || !control.push(SendAncillaryMessage::ScmRights(descriptors)))
    {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    let sent = rustix::io::retry_on_intr(|| {
        // No signal when the other side is gone: the error says it.
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(sent)
}

/// Receives bytes into `buffer`, and what came with them behind `descriptors` (not inherited by programs that this one
/// starts). 0 bytes: the other side has closed.
///
/// # Errors
/// Those of recvmsg(2); a message that is cut off because it holds more than `buffer` or [`DESCRIPTORS_MAX`] is
/// refused.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>, wait: bool) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = if wait { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
    let received = rustix::io::retry_on_intr(|| recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            descriptors.extend(files);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is longer than it may be"));
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn files_arrive_open() {
        let (left, right) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        assert_eq!(send(&left, b"a file", &[file.as_fd(), left.as_fd()]).unwrap(), 6);
        let (mut buffer, mut descriptors) = ([0; 64], Vec::new());
        let length = receive(&right, &mut buffer, &mut descriptors, true).unwrap();
        assert_eq!(&buffer[..length], b"a file");
        assert_eq!(descriptors.len(), 2);
        let mut arrived = std::fs::File::from(descriptors.swap_remove(0));
        arrived.rewind().unwrap();
        let mut content = String::new();
        arrived.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
    }

    #[test]
    fn limits_are_said() {
        let (left, right) = UnixStream::pair().unwrap();
        let many = vec![left.as_fd(); DESCRIPTORS_MAX + 1];
        assert_eq!(send(&left, b"x", &many).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let (mut buffer, mut descriptors) = ([0; 8], Vec::new());
        let empty = receive(&right, &mut buffer, &mut descriptors, false).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
        drop(left);
        assert_eq!(receive(&right, &mut buffer, &mut descriptors, true).unwrap(), 0);
    }
}
