//! The page of metrics: `/metrics` for Prometheus, `/status` as JSON, `/healthz` for probes.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use tokio::task::JoinHandle;

/// What a page tells. A method may take as long as a question to the servers takes.
pub trait Observed: Send + Sync + 'static {
    /// The metrics in Prometheus' text form.
    fn metrics(&self) -> impl Future<Output = String> + Send;

    /// Everything as one JSON document.
    fn status(&self) -> impl Future<Output = serde_json::Value> + Send;

    /// `Ok` when clients are served, else what stands in the way.
    fn health(&self) -> impl Future<Output = Result<(), String>> + Send;
}

/// A page that is served until it is dropped.
#[derive(Debug)]
pub struct Page {
    task: JoinHandle<()>,
}

impl Page {
    /// Serves what `observed` tells on `listener`, a TCP or a Unix socket that is bound already.
    pub fn serve<L, O>(listener: L, observed: Arc<O>) -> Page
    where
        L: Listener,
        L::Addr: std::fmt::Debug,
        O: Observed,
    {
        Page::serve_with(listener, observed, Router::new())
    }

    /// The same, and `more`.
    pub(crate) fn serve_with<L, O>(listener: L, observed: Arc<O>, more: Router) -> Page
    where
        L: Listener,
        L::Addr: std::fmt::Debug,
        O: Observed,
    {
        let routes = Router::new()
            .route("/metrics", get(metrics::<O>))
            .route("/status", get(status::<O>))
            .route("/healthz", get(healthz::<O>))
            .with_state(observed)
            .merge(more);
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, routes).await {
                tracing::error!(%error, "the page of metrics ended");
            }
        });
        Page { task }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn metrics<O: Observed>(State(observed): State<Arc<O>>) -> Response {
    // Source of the content type: Prometheus documentation, "Exposition formats".
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], observed.metrics().await).into_response()
}

async fn status<O: Observed>(State(observed): State<Arc<O>>) -> Response {
    axum::Json(observed.status().await).into_response()
}

async fn healthz<O: Observed>(State(observed): State<Arc<O>>) -> Response {
    match observed.health().await {
        Ok(()) => (StatusCode::OK, "ok\n").into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}
