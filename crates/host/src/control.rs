//! Changing a running cluster: `POST /scale` and `POST /reinit`, on the Unix socket only.
//!
//! The answer is one JSON object a line, an [`Event`] each; the last one is `done` or `failed`. The change goes on when
//! whoever asked for it goes away.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Json;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http_body::Frame;
use tokio::sync::mpsc;

use crate::change::{Change, CloneOptions, ReinitRequest, ScaleRequest};
use crate::membership::Membership;
use crate::{Event, HostError, Progress};

/// Events that wait for a client; one that reads more slowly misses some, but never the last.
pub(crate) const EVENTS_MAX: usize = 256;

/// What may be asked for.
pub(crate) fn routes(membership: Arc<Membership>) -> axum::Router {
    axum::Router::new().route("/scale", post(scale)).route("/reinit", post(reinit)).with_state(membership)
}

async fn scale(State(membership): State<Arc<Membership>>, Json(request): Json<ScaleRequest>) -> Response {
    let ScaleRequest { replicas, clone, wait } = request;
    begin(&membership, Change::Scale { replicas }, clone, wait)
}

async fn reinit(State(membership): State<Arc<Membership>>, Json(request): Json<ReinitRequest>) -> Response {
    let ReinitRequest { follower, clone, wait } = request;
    begin(&membership, Change::Reinit { follower }, clone, wait)
}

fn begin(membership: &Arc<Membership>, change: Change, options: CloneOptions, wait: bool) -> Response {
    let (sender, events) = mpsc::channel(EVENTS_MAX);
    let progress = Arc::new(ToClient(sender.clone()));
    let outcome = match membership.begin(change, options, wait, progress) {
        Ok(outcome) => outcome,
        Err(error) => return (status_of(&error), format!("{error}\n")).into_response(),
    };
    tokio::spawn(async move {
        let last = match outcome.await {
            Ok(Ok(followers)) => Event::Done { followers },
            Ok(Err(error)) => Event::Failed { message: error.to_string() },
            Err(_) => Event::Failed { message: "the cluster is being stopped; the next `up` goes on".to_owned() },
        };
        // A client that is gone does not want to know.
        let _ = sender.send(last).await;
    });
    lines(events)
}

/// The answer whose body is events as they come.
pub(crate) fn lines(events: mpsc::Receiver<Event>) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(Lines(events))).into_response()
}

fn status_of(error: &HostError) -> StatusCode {
    match error {
        HostError::ChangeRunning { .. } => StatusCode::CONFLICT,
        HostError::NoSuchFollower { .. } => StatusCode::NOT_FOUND,
        HostError::TooManyReplicas { .. } => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Events for a client.
struct ToClient(mpsc::Sender<Event>);

impl Progress for ToClient {
    fn report(&self, event: Event) {
        // Full: the next one tells as much. Closed: the client has gone.
        let _ = self.0.try_send(event);
    }
}

/// The answer's body: events as they come.
struct Lines(mpsc::Receiver<Event>);

impl HttpBody for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| {
            let mut line = serde_json::to_vec(&event?).expect("events are strings and numbers");
            line.push(b'\n');
            Some(Ok(Frame::data(Bytes::from(line))))
        })
    }
}
