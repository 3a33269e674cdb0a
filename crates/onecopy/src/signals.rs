//! Ctrl-C and SIGTERM: the first stops cleanly, each further one tells what is still going on.

use std::sync::{Arc, Mutex};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Learns of signals from its making on.
#[derive(Debug)]
pub struct StopSignal {
    seen: watch::Receiver<bool>,
    going_on: Arc<Mutex<String>>,
}

impl StopSignal {
    /// Takes over SIGINT and SIGTERM. Must be called inside a runtime.
    pub fn listen() -> std::io::Result<StopSignal> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (sender, seen) = watch::channel(false);
        let going_on = Arc::new(Mutex::new("stopping".to_owned()));
        let told = Arc::clone(&going_on);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if sender.send_replace(true) {
                    let step = told.lock().expect("nobody panics with this lock").clone();
                    eprintln!("onecopy: still going on: {step}");
                }
            }
        });
        Ok(StopSignal { seen, going_on })
    }

    /// Returns when the first signal has come.
    pub async fn received(&self) {
        let mut seen = self.seen.clone();
        // The sender lives as long as the process.
        let _ = seen.wait_for(|seen| *seen).await;
    }

    /// What a second signal tells.
    pub fn tell(&self, step: &str) {
        *self.going_on.lock().expect("nobody panics with this lock") = step.to_owned();
    }
}
