//! Bytes carried between two connections.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::sync::Notify;

/// Bytes on their way in one direction.
const CARRIED_BYTES: usize = 256 << 10;

/// How long one direction goes on once the other one has failed.
const LINGER: Duration = Duration::from_secs(10);

/// Carries bytes both ways until both have ended. A side that takes nothing any more is heard for a while yet, unlike
/// by [`tokio::io::copy_bidirectional`]: who gives up says why, and reads nothing behind that.
pub async fn carry(one: impl AsyncRead + AsyncWrite, other: impl AsyncRead + AsyncWrite) {
    carry_and_linger(one, other, LINGER).await;
}

async fn carry_and_linger(one: impl AsyncRead + AsyncWrite, other: impl AsyncRead + AsyncWrite, linger: Duration) {
    let ((one_from, one_to), (other_from, other_to)) = (split(one), split(other));
    let failed = Notify::new();
    let note = |ended: io::Result<()>| {
        if let Err(error) = ended {
            tracing::debug!(%error, "one direction of a carried connection is lost");
            failed.notify_one();
        }
    };
    let there = carry_to_end(one_from, other_to, note);
    let back = carry_to_end(other_from, one_to, note);
    let lingers = async {
        failed.notified().await;
        tokio::time::sleep(linger).await;
    };
    tokio::select! {
        _ = async { tokio::join!(there, back) } => {}
        () = lingers => {}
    }
}

async fn carry_to_end(from: impl AsyncRead, to: impl AsyncWrite, note: impl Fn(io::Result<()>)) {
    let (mut from, mut to) = (std::pin::pin!(from), std::pin::pin!(to));
    let mut bytes = vec![0; CARRIED_BYTES];
    let ended: io::Result<()> = async {
        loop {
            match from.read(&mut bytes).await? {
                0 => return Ok(()),
                count => to.write_all(&bytes[..count]).await?,
            }
            to.flush().await?;
        }
    }
    .await;
    // Before anything else that may wait.
    note(ended);
    // However it has ended, the other side hears that nothing more comes.
    note(to.shutdown().await);
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::ReadBuf;
    use tokio::net::UnixStream;

    use super::*;

    /// All that comes, however it ends.
    async fn heard(from: &mut UnixStream) -> Vec<u8> {
        let (mut heard, mut bytes) = (Vec::new(), [0; 64]);
        while let Ok(count @ 1..) = from.read(&mut bytes).await {
            heard.extend_from_slice(&bytes[..count]);
        }
        heard
    }

    /// The last words of a side that has closed with bytes unread arrive; so does what comes behind the other's end.
    ///
    /// Spec: D6
    #[tokio::test]
    async fn what_a_side_says_as_it_gives_up_arrives() {
        let ((mut near, one), (other, mut far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let carried = tokio::spawn(carry(one, other));
        let sends = tokio::spawn(async move {
            // More than all buffers take: who carries waits to write.
            near.write_all(&vec![1; 64 << 20]).await.unwrap_err();
            heard(&mut near).await
        });
        far.read_exact(&mut [0; 1]).await.unwrap();
        far.write_all(b"no room").await.unwrap();
        drop(far);
        carried.await.unwrap();
        assert_eq!(sends.await.unwrap(), b"no room");

        let ((mut near, one), (other, mut far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let carried = tokio::spawn(carry(one, other));
        near.write_all(b"ask").await.unwrap();
        near.shutdown().await.unwrap();
        assert_eq!(heard(&mut far).await, b"ask");
        far.write_all(b"answer").await.unwrap();
        drop(far);
        assert_eq!(heard(&mut near).await, b"answer");
        carried.await.unwrap();
    }

    /// Its peer is gone without a word.
    struct Broken;

    impl AsyncRead for Broken {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
        }
    }

    impl AsyncWrite for Broken {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A side that only waits hears that the other one is lost, and where it does nothing about that it is left.
    ///
    /// Spec: D6
    #[tokio::test]
    async fn who_waits_for_a_side_that_is_lost_hears_of_it_and_is_left() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let carried = tokio::spawn(carry_and_linger(Broken, near, Duration::from_millis(10)));
        assert_eq!(far.read(&mut [0; 1]).await.unwrap(), 0);
        carried.await.unwrap();
    }
}
