//! How the events of long work are shown: bars on a terminal, lines elsewhere, JSON for programs.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};
use onecopy_host::{CloneStatus, Event, Progress};
use onecopy_memory::engine::Progress as Resizing;

use crate::output;
use crate::signals::StopSignal;

/// One way to show events.
pub enum Display {
    /// A line that moves, and one for each clone that is filled; each finished step stays as a line.
    Terminal(Mutex<Screen>),
    /// A line a step.
    Lines,
    /// A JSON object a line.
    Json,
}

/// What moves on a terminal.
pub struct Screen {
    all: MultiProgress,
    step: ProgressBar,
    clones: BTreeMap<String, ProgressBar>,
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
        let all = MultiProgress::new();
        let step = all.add(ProgressBar::new_spinner());
        step.enable_steady_tick(Duration::from_millis(100));
        Display::Terminal(Mutex::new(Screen { all, step, clones: BTreeMap::new() }))
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
            Display::Terminal(screen) => screen.lock().expect("showing does not panic").show(event),
            Display::Lines => show_as_line(event),
            Display::Json => show_as_json(&event),
        }
    }

    /// Takes a moving line away.
    pub fn finish(&self) {
        if let Display::Terminal(screen) = self {
            screen.lock().expect("showing does not panic").finish();
        }
    }
}

impl Progress for Display {
    fn report(&self, event: Event) {
        self.show(event);
    }
}

impl Screen {
    fn show(&mut self, event: Event) {
        let step = &self.step;
        match event {
            Event::Step { message } => {
                leave_done(step);
                if step.is_finished() {
                    step.reset();
                }
                step.set_style(ProgressStyle::default_spinner());
                step.set_message(message);
            }
            Event::Copying { done_bytes, total_bytes, .. } => {
                let style = ProgressStyle::with_template("{spinner} {msg} [{bar:16}] {bytes}/{total_bytes}");
                step.set_style(style.expect("the template is constant and well formed"));
                step.set_length(total_bytes.max(done_bytes));
                step.set_position(done_bytes);
            }
            Event::Filling { server, clone, replay_lag_bytes } => self.show_filling(server, &clone, replay_lag_bytes),
            Event::Whole { server } => {
                if let Some(bar) = self.clones.remove(&server) {
                    bar.finish_and_clear();
                }
                self.step.println(format!("  done: {server} is whole"));
            }
            Event::Resizing { instance, progress } => self.show_resizing(&instance, &progress),
            last if last.is_last() => self.finish(),
            other => {
                if let Some(line) = line(&other) {
                    step.println(format!("  {line}"));
                }
            }
        }
    }

    fn show_filling(&mut self, server: String, clone: &CloneStatus, replay_lag_bytes: Option<u64>) {
        let bar = self.clones.entry(server.clone()).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(clone.total_bytes));
            let style = ProgressStyle::with_template("  {prefix} [{bar:24}] {percent} % of {total_bytes}{msg}");
            bar.set_style(style.expect("the template is constant and well formed"));
            bar.set_prefix(server);
            bar
        });
        bar.set_length(clone.total_bytes);
        bar.set_position(clone.filled_bytes);
        bar.set_message(filling(clone, replay_lag_bytes));
    }

    fn show_resizing(&self, instance: &str, progress: &Resizing) {
        let style = ProgressStyle::with_template("{spinner} [{bar:24}] {bytes} of {total_bytes} {prefix}");
        let Resizing { from_bytes, target_bytes, pool_bytes, blocked_by } = progress;
        let what = if target_bytes < from_bytes { "given back by" } else { "gained by" };
        let waits = blocked_by.as_ref().map(|reason| format!(", waits: {reason}")).unwrap_or_default();
        self.step.set_style(style.expect("the template is constant and well formed"));
        self.step.set_prefix(format!("{what} {instance}{waits}"));
        self.step.set_length(from_bytes.abs_diff(*target_bytes));
        self.step.set_position(from_bytes.abs_diff(*pool_bytes));
    }

    fn finish(&mut self) {
        leave_done(&self.step);
        for bar in std::mem::take(&mut self.clones).into_values() {
            bar.finish_and_clear();
        }
        self.step.finish_and_clear();
    }
}

/// What a bar does not show: rate, time left, accesses that waited, lag.
fn filling(clone: &CloneStatus, replay_lag_bytes: Option<u64>) -> String {
    let mut text = format!(", {}/s", HumanBytes(clone.rate_bytes_per_second));
    if let Some(seconds) = clone.left_seconds {
        text.push_str(&format!(", {seconds} s left"));
    }
    text.push_str(&format!(", {} faults served", clone.demand_faults));
    if let Some(bytes) = replay_lag_bytes {
        text.push_str(&format!(", lag {}", HumanBytes(bytes)));
    }
    text
}

/// Leaves the step that has ended as a line.
fn leave_done(bar: &ProgressBar) {
    let step = bar.message();
    if !step.is_empty() {
        bar.println(format!("  done: {step}"));
        bar.set_message("");
    }
}

/// An event that is one line wherever it is shown to people; none for the others.
fn line(event: &Event) -> Option<String> {
    match event {
        Event::Notice { message } => Some(format!("note: {message}")),
        Event::Way { reason, .. } => Some(format!("way: {reason}")),
        Event::Answering { server, elapsed_ms } => {
            Some(format!("{server} answers, {:.2} s after the beginning", *elapsed_ms as f64 / 1000.0))
        }
        Event::Whole { server } => Some(format!("{server} is whole")),
        _ => None,
    }
}

fn show_as_line(event: Event) {
    match &event {
        Event::Step { message } => output::note(message),
        // A line a percent would bury the steps; the end of a copy is the next step.
        other => {
            if let Some(line) = line(other) {
                output::note(line);
            }
        }
    }
}

fn show_as_json(event: &Event) {
    output::say(serde_json::to_string(event).expect("events are strings and numbers"));
}
