//! Signals that end the program: the first stops cleanly, each further one tells what is still going on.

use std::sync::{Arc, Mutex};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::output;

/// Whether the end of the terminal ends the program too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HangUp {
    /// SIGHUP is a request to stop.
    Stops,
    /// SIGHUP means something else.
    IsLeftAlone,
}

/// Learns of signals from its making on.
#[derive(Debug)]
pub struct StopSignal {
    seen: watch::Receiver<bool>,
    going_on: Arc<Mutex<String>>,
}

impl StopSignal {
    /// Takes over SIGINT, SIGTERM and, if so wanted, SIGHUP. Must be called inside a runtime.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn listen(hang_up: HangUp) -> std::io::Result<StopSignal> {
        let (sender, seen) = watch::channel(false);
        let going_on = Arc::new(Mutex::new("stopping".to_owned()));
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        kinds.extend((hang_up == HangUp::Stops).then(SignalKind::hangup));
        for kind in kinds {
            let mut arrivals = signal(kind)?;
            let (sender, told) = (sender.clone(), Arc::clone(&going_on));
            tokio::spawn(async move {
                while arrivals.recv().await.is_some() {
                    if sender.send_replace(true) {
                        let step = told.lock().expect("nobody panics with this lock").clone();
                        output::note(format_args!("still going on: {step}"));
                    }
                }
            });
        }
        Ok(StopSignal { seen, going_on })
    }

    /// Returns when the first signal has come.
    pub async fn received(&self) {
        let mut seen = self.seen.clone();
        // The senders live as long as the process.
        let _ = seen.wait_for(|seen| *seen).await;
    }

    /// What a second signal tells.
    pub fn tell(&self, step: &str) {
        *self.going_on.lock().expect("nobody panics with this lock") = step.to_owned();
    }
}
