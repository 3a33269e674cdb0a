//! Work that several threads share.

use std::sync::{Mutex, PoisonError};

use super::DeltaError;

/// Does something with each item, by so many threads at most; the first error that one of them had.
pub(super) fn each<T: Send>(
    threads: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> Result<(), DeltaError> + Sync,
) -> Result<(), DeltaError> {
    let threads = threads.min(items.len());
    let items = Mutex::new(items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(item) = next() {
            if let Err(error) = work(item) {
                // Nobody begins another one.
                while next().is_some() {}
                return Err(error);
            }
        }
        Ok(())
    };
    if threads <= 1 {
        return work();
    }
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let joined = others.into_iter().map(|other| match other.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.fold(own, |first, ended| first.and(ended))
    })
}
