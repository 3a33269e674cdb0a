//! Whole frames from and to a stream.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{FRAME_BYTES_MAX, Message, ProtocolError};

/// Reads one message; `buffer` is only there to be used again. Not to be given up half way: the stream would be out of
/// step.
///
/// # Errors
/// [`ProtocolError`]; [`ProtocolError::Broken`] also when the stream ends.
pub async fn read_message<R>(reader: &mut R, buffer: &mut Vec<u8>) -> Result<Message, ProtocolError>
where
    R: AsyncRead + Unpin,
{
    let length = usize::try_from(reader.read_u32_le().await?).unwrap_or(usize::MAX);
    if length > FRAME_BYTES_MAX {
        return Err(ProtocolError::TooLong(length));
    }
    buffer.clear();
    // Grows with what comes: a length alone must not make us take memory.
    let taken = (&mut *reader).take(length as u64).read_to_end(buffer).await?;
    if taken < length {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Message::parse(buffer)
}

/// Writes one message, and flushes. `buffer` is only there to be used again.
///
/// # Errors
/// [`ProtocolError::Broken`]; [`ProtocolError::TooLong`] for a message that nobody would take.
pub async fn write_message<W>(writer: &mut W, message: &Message, buffer: &mut Vec<u8>) -> Result<usize, ProtocolError>
where
    W: AsyncWrite + Unpin,
{
    buffer.clear();
    buffer.extend_from_slice(&[0; size_of::<u32>()]);
    message.write_to(buffer)?;
    let length = buffer.len() - size_of::<u32>();
    if length > FRAME_BYTES_MAX {
        return Err(ProtocolError::TooLong(length));
    }
    let prefix = u32::try_from(length).expect("a frame is far shorter than 4 GiB");
    buffer[..size_of::<u32>()].copy_from_slice(&prefix.to_le_bytes());
    writer.write_all(buffer).await?;
    writer.flush().await?;
    Ok(buffer.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_as_they_went_and_long_ones_not_at_all() {
        let (mut near, mut far) = tokio::io::duplex(64);
        let mut buffer = Vec::new();
        let messages = [Message::KeepAlive, Message::Open { plan: vec![7; 5000] }, Message::End { whole: true }];
        let sent = messages.clone();
        let sender = tokio::spawn(async move {
            let mut buffer = Vec::new();
            for message in &sent {
                write_message(&mut near, message, &mut buffer).await.unwrap();
            }
            let error = write_message(&mut near, &Message::Open { plan: vec![0; FRAME_BYTES_MAX] }, &mut buffer).await;
            assert!(matches!(error, Err(ProtocolError::TooLong(_))), "{error:?}");
            // A frame that ends too soon.
            near.write_all(&[9, 0, 0, 0, 1]).await.unwrap();
        });
        for message in &messages {
            assert_eq!(read_message(&mut far, &mut buffer).await.unwrap(), *message);
        }
        sender.await.unwrap();
        let error = read_message(&mut far, &mut buffer).await;
        assert!(matches!(error, Err(ProtocolError::Broken(_))), "{error:?}");
        let mut hostile: &[u8] = &[255, 255, 255, 255, 1];
        let error = read_message(&mut hostile, &mut buffer).await;
        assert!(matches!(error, Err(ProtocolError::TooLong(_))), "{error:?}");
    }
}
