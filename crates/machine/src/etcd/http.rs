//! One request over HTTP/1.1, and its answer.

use std::path::Path;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use onecopy_clone::network::client::{Stream, connect};
use onecopy_clone::network::keys::HostKeys;
use onecopy_clone::network::protocol::words;
use tokio::net::TcpStream;

/// No answer that is asked for is longer.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Posts JSON to `HOST:PORT`, with these keys over TLS; what it answers with status 200.
///
/// # Errors
/// In words, where it answers otherwise or not at all.
pub(super) async fn post(keys: Option<&Path>, address: &str, path: &str, body: String) -> Result<Bytes, String> {
    let stream: Box<dyn Stream> = match keys {
        Some(keys) => {
            let keys = HostKeys::load(keys).map_err(|error| error.to_string())?;
            Box::new(connect(address, &keys).await.map_err(|error| error.to_string())?)
        }
        None => Box::new(TcpStream::connect(address).await.map_err(|error| format!("cannot connect: {error}"))?),
    };
    let lost = |error: hyper::Error| format!("it does not speak HTTP: {error}");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
    let request = Request::post(path).header(HOST, address).header(CONTENT_TYPE, "application/json");
    let request = request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(lost)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| format!("its answer is cut off, or too long: {error}"))?.to_bytes();
        match status {
            StatusCode::OK => Ok(body),
            refused => Err(format!("it answers {refused}: {}", words(&String::from_utf8_lossy(&body)))),
        }
    };
    tokio::pin!(exchange);
    tokio::select! {
        // What has come counts, also where the connection is lost by then.
        biased;
        answered = &mut exchange => answered,
        // It may end when all has been read; what was asked for ends then, too.
        ended = connection => match ended {
            Ok(()) => exchange.await,
            Err(error) => Err(lost(error)),
        },
    }
}
