//! `GET /memory`, `POST /memory/set` and `POST /memory/auto`, on the Unix socket only.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use onecopy_memory::engine::{Change, Progress};
use onecopy_memory::{InstanceName, MemoryError, Size};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::service::MemoryService;
use crate::control::{EVENTS_MAX, lines};
use crate::{Event, HostError};

/// The body of `POST /memory/set`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRequest {
    /// Which server.
    pub instance: InstanceName,
    /// How much; a share is one of its ceiling.
    pub size: Size,
    /// The answer ends when it has it, not when it was told.
    #[serde(default)]
    pub wait: bool,
}

/// The body of `POST /memory/auto`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoRequest {
    /// Targets follow need and pressure from now on, also where a size was set by hand.
    pub automatic: bool,
    /// Of one server; none: of all, and of those to come.
    #[serde(default)]
    pub instance: Option<InstanceName>,
}

/// What may be asked for.
pub(crate) fn routes(service: Arc<MemoryService>) -> Router {
    Router::new()
        .route("/memory", get(status))
        .route("/memory/set", post(set))
        .route("/memory/auto", post(auto))
        .with_state(service)
}

async fn status(State(service): State<Arc<MemoryService>>) -> Response {
    Json(service.status()).into_response()
}

async fn auto(State(service): State<Arc<MemoryService>>, Json(request): Json<AutoRequest>) -> Response {
    let AutoRequest { automatic, instance } = request;
    match service.set_auto(instance.as_ref(), automatic) {
        Ok(()) => {
            tracing::info!(
                automatic,
                instance = instance.as_ref().map(tracing::field::display),
                "memory: the automatic is switched"
            );
            single(Event::Switched { instance: instance.map(String::from), automatic })
        }
        Err(error) => refusal(&error),
    }
}

async fn set(State(service): State<Arc<MemoryService>>, Json(request): Json<SetRequest>) -> Response {
    let SetRequest { instance, size, wait } = request;
    let told = match service.set(&instance, size).await {
        Ok(told) => told,
        Err(error) => return refusal(&error),
    };
    if !wait {
        return single(Event::Resized { instance: instance.into(), change: told });
    }
    let (sender, events) = mpsc::channel(EVENTS_MAX);
    tokio::spawn(async move {
        tokio::select! {
            () = tell_until_reached(&service, instance, &told, &sender) => {}
            // Nobody waits for it any more; the size holds all the same.
            () = sender.closed() => {}
        }
    });
    lines(events)
}

async fn tell_until_reached(
    service: &MemoryService,
    instance: InstanceName,
    told: &Change,
    sender: &mpsc::Sender<Event>,
) {
    let report = |progress: &Progress| {
        let progress = Progress { from_bytes: told.from_bytes, ..progress.clone() };
        // Full: the next one tells as much.
        let _ = sender.try_send(Event::Resizing { instance: instance.to_string(), progress });
    };
    let last = match service.reach(&instance, told, &report).await {
        Ok(change) => Event::Resized { instance: instance.to_string(), change },
        Err(error) => Event::Failed { message: error.to_string() },
    };
    let _ = sender.send(last).await;
}

fn single(event: Event) -> Response {
    let (sender, events) = mpsc::channel(1);
    sender.try_send(event).expect("a new channel has room for one");
    lines(events)
}

fn refusal(error: &HostError) -> Response {
    let status = match error {
        HostError::Memory(MemoryError::UnknownInstance { .. }) => StatusCode::NOT_FOUND,
        HostError::Memory(_) => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, format!("{error}\n")).into_response()
}
