//! Where a test looks at a directory after each step that changes it: a kill may leave it like that.

use std::path::Path;
use std::sync::OnceLock;

static OBSERVER: OnceLock<fn(&Path)> = OnceLock::new();

/// Has `observer` called after each step, with the path that was changed. Only the first call counts.
pub fn observe_steps(observer: fn(&Path)) {
    // A second one is the same test's.
    let _ = OBSERVER.set(observer);
}

pub(crate) fn done(path: &Path) {
    if let Some(observer) = OBSERVER.get() {
        observer(path);
    }
}
