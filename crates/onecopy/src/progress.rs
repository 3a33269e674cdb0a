//! How the events of long work are shown: a bar on a terminal, lines elsewhere, JSON for programs.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use onecopy_host::{Event, Progress};

use crate::signals::StopSignal;

/// One way to show events.
pub enum Display {
    /// A line that moves; each finished step stays as a line.
    Terminal(Mutex<ProgressBar>),
    /// A line a step.
    Lines,
    /// A JSON object a line.
    Json,
}

impl Display {
    /// The way that fits standard error, or JSON on standard output.
    pub fn choose(json: bool) -> Display {
        if json {
            return Display::Json;
        }
        if !std::io::stderr().is_terminal() {
            return Display::Lines;
        }
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(100));
        Display::Terminal(Mutex::new(bar))
    }

    /// Also tells `signal` of each step, for a second Ctrl-C.
    pub fn telling(self: &Arc<Self>, signal: Arc<StopSignal>) -> impl Progress + 'static {
        let display = Arc::clone(self);
        move |event: Event| {
            if let Event::Step { message } = &event {
                signal.tell(message);
            }
            display.show(event);
        }
    }

    /// Shows one event.
    pub fn show(&self, event: Event) {
        match self {
            Display::Terminal(bar) => show_on_terminal(&bar.lock().expect("showing does not panic"), event),
            Display::Lines => show_as_line(event),
            Display::Json => show_as_json(&event),
        }
    }

    /// Takes a moving line away.
    pub fn finish(&self) {
        if let Display::Terminal(bar) = self {
            let bar = bar.lock().expect("showing does not panic");
            leave_done(&bar);
            bar.finish_and_clear();
        }
    }
}

impl Progress for Display {
    fn report(&self, event: Event) {
        self.show(event);
    }
}

fn show_on_terminal(bar: &ProgressBar, event: Event) {
    match event {
        Event::Step { message } => {
            leave_done(bar);
            if bar.is_finished() {
                bar.reset();
            }
            bar.set_style(ProgressStyle::default_spinner());
            bar.set_message(message);
        }
        Event::Copying { done_bytes, total_bytes, .. } => {
            let style = ProgressStyle::with_template("{spinner} {msg} [{bar:16}] {bytes}/{total_bytes}");
            bar.set_style(style.expect("the template is constant and well formed"));
            bar.set_length(total_bytes.max(done_bytes));
            bar.set_position(done_bytes);
        }
        Event::Notice { message } => bar.println(format!("  note: {message}")),
        Event::Ready { .. } => {
            leave_done(bar);
            bar.finish_and_clear();
        }
        Event::Failed { .. } => bar.finish_and_clear(),
    }
}

/// Leaves the step that has ended as a line.
fn leave_done(bar: &ProgressBar) {
    let step = bar.message();
    if !step.is_empty() {
        bar.println(format!("  done: {step}"));
        bar.set_message("");
    }
}

fn show_as_line(event: Event) {
    match event {
        Event::Step { message } => eprintln!("onecopy: {message}"),
        Event::Notice { message } => eprintln!("onecopy: note: {message}"),
        // A line a percent would bury the steps; the end of a copy is the next step.
        Event::Copying { .. } | Event::Ready { .. } | Event::Failed { .. } => {}
    }
}

fn show_as_json(event: &Event) {
    let line = serde_json::to_string(event).expect("events are strings and numbers");
    // Whoever read this may be gone, as the starter of a detached daemon is: the work goes on.
    let _ = writeln!(std::io::stdout(), "{line}");
}
