//! A few threads for what must not hold a listener up.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::CloneError;

/// Who waits for room calls back this often.
const ROOM_CHECK: Duration = Duration::from_millis(100);

/// Threads that work on jobs in the order of their coming; dropped, they finish all of them first.
#[derive(Debug)]
pub(super) struct WorkerPool<J> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<J> {
    queue: Mutex<Queue<J>>,
    jobs_max: usize,
    /// A job came, or the end.
    came: Condvar,
    /// A job was taken.
    taken: Condvar,
}

#[derive(Debug)]
struct Queue<J> {
    jobs: VecDeque<J>,
    ended: bool,
}

impl<J: Send + 'static> WorkerPool<J> {
    /// `threads_count` threads that do `work` on each job; at most `jobs_max` wait.
    ///
    /// # Errors
    /// [`CloneError::Kernel`]: no thread can be started.
    pub fn start(
        name: &str,
        threads_count: usize,
        jobs_max: usize,
        work: impl Fn(J) + Send + Sync + 'static,
    ) -> Result<WorkerPool<J>, CloneError> {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), ended: false });
        let shared = Arc::new(Shared { queue, jobs_max, came: Condvar::new(), taken: Condvar::new() });
        let mut pool = WorkerPool { shared, threads: Vec::new() };
        let work = Arc::new(work);
        for _ in 0..threads_count {
            let (shared, work) = (Arc::clone(&pool.shared), Arc::clone(&work));
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                while let Some(job) = shared.next() {
                    work(job);
                }
            });
            pool.threads.push(thread.map_err(CloneError::kernel("start a thread"))?);
        }
        Ok(pool)
    }

    /// Gives the threads a job; with no room waits for it, calling `waiting` now and then.
    pub fn submit(&self, job: J, mut waiting: impl FnMut()) {
        let mut queue = self.shared.lock();
        while queue.jobs.len() >= self.shared.jobs_max {
            let waited = self.shared.taken.wait_timeout(queue, ROOM_CHECK);
            queue = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            waiting();
        }
        queue.jobs.push_back(job);
        self.shared.came.notify_one();
    }
}

impl<J> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, Queue<J>> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn next(&self) -> Option<J> {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                self.taken.notify_one();
                return Some(job);
            }
            if queue.ended {
                return None;
            }
            queue = self.came.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

impl<J> Drop for WorkerPool<J> {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.came.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_finds_no_room_waits_for_it_and_every_job_is_done() {
        let (release, held) = mpsc::channel::<()>();
        let (held, done) = (Mutex::new(held), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&done);
        let pool = WorkerPool::start("test", 1, 2, move |_job: usize| {
            let _ = held.lock().unwrap().recv();
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let pool = pool.unwrap();
        // One at work and two that wait fit; a fourth has to be let in.
        let mut waits = 0;
        for job in 0..4 {
            pool.submit(job, || {
                waits += 1;
                release.send(()).unwrap();
            });
        }
        assert!(waits >= 1);
        drop(release);
        drop(pool);
        assert_eq!(done.load(Ordering::SeqCst), 4);
    }
}
