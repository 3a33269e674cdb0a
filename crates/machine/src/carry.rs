//! Bytes carried between two connections.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

/// Bytes on their way in one direction.
const CARRIED_BYTES: usize = 256 << 10;

/// Carries bytes both ways until both have ended. A side that takes nothing any more is heard to its end, unlike by
/// [`tokio::io::copy_bidirectional`]: who gives up says why, and reads nothing behind that.
pub async fn carry(one: impl AsyncRead + AsyncWrite, other: impl AsyncRead + AsyncWrite) {
    let ((one_from, one_to), (other_from, other_to)) = (split(one), split(other));
    tokio::join!(carry_to_end(one_from, other_to), carry_to_end(other_from, one_to));
}

async fn carry_to_end(from: impl AsyncRead, to: impl AsyncWrite) {
    let (mut from, mut to) = (std::pin::pin!(from), std::pin::pin!(to));
    let mut bytes = vec![0; CARRIED_BYTES];
    let ended: std::io::Result<()> = async {
        loop {
            match from.read(&mut bytes).await? {
                0 => return to.shutdown().await,
                count => to.write_all(&bytes[..count]).await?,
            }
            to.flush().await?;
        }
    }
    .await;
    if let Err(error) = ended {
        tracing::debug!(%error, "one direction of a carried connection is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    /// The last words of a side that has closed with bytes unread arrive; so does what comes behind the other's end.
    ///
    /// Spec: D6
    #[tokio::test]
    async fn what_a_side_says_as_it_gives_up_arrives() {
        let ((mut near, one), (other, mut far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let carried = tokio::spawn(carry(one, other));
        // More than all buffers take: who carries waits to write.
        let sends = tokio::spawn(async move {
            let error = near.write_all(&vec![1; 64 << 20]).await.unwrap_err();
            let mut heard = String::new();
            near.read_to_string(&mut heard).await.unwrap();
            (error.kind(), heard)
        });
        far.read_exact(&mut [0; 1]).await.unwrap();
        far.write_all(b"no room").await.unwrap();
        drop(far);
        carried.await.unwrap();
        assert_eq!(sends.await.unwrap(), (std::io::ErrorKind::BrokenPipe, "no room".to_owned()));

        let ((mut near, one), (other, mut far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let carried = tokio::spawn(carry(one, other));
        near.write_all(b"ask").await.unwrap();
        near.shutdown().await.unwrap();
        let (mut asked, mut heard) = (String::new(), String::new());
        far.read_to_string(&mut asked).await.unwrap();
        far.write_all(b"answer").await.unwrap();
        drop(far);
        near.read_to_string(&mut heard).await.unwrap();
        carried.await.unwrap();
        assert_eq!((asked, heard), ("ask".to_owned(), "answer".to_owned()));
    }
}
