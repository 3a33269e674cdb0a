//! Being quick while others wait: a stretch of work in which this thread is neither preempted by ordinary processes nor
//! interrupted by a signal, and in which none of its own memory has to be read from disk first.

use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use rustix::mm::{MlockAllFlags, mlockall, munlockall};

/// The lowest real-time priority: above all ordinary processes, below all that others have made real-time.
const PRIORITY: libc::c_int = 1;

/// How many keep this process' memory in RAM: the kernel knows only whether it is kept.
static KEEPERS: Mutex<usize> = Mutex::new(0);

/// Keeps what this process uses in RAM, until it and all others are dropped.
pub(super) struct LockedMemory(bool);

impl LockedMemory {
    /// Begins. Not possible without root or with a limit on locked memory: then it does nothing.
    pub fn begin() -> LockedMemory {
        let mut keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
        // Only what is there or is touched: nothing is brought in for it.
        let is_kept = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT).is_ok();
        *keepers += usize::from(is_kept);
        LockedMemory(is_kept)
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        let mut keepers = KEEPERS.lock().unwrap_or_else(PoisonError::into_inner);
        *keepers -= usize::from(self.0);
        if self.0 && *keepers == 0 {
            let _ = munlockall();
        }
    }
}

/// The stretch of work; ends when it is dropped, on the thread that began it.
pub(super) struct RealTimeSection {
    signals_before: libc::sigset_t,
    /// The ordinary way in which this thread is scheduled; none when it could not be changed.
    schedule_before: Option<(libc::c_int, libc::sched_param)>,
    /// It belongs to one thread.
    _not_sent: std::marker::PhantomData<*const ()>,
}

impl RealTimeSection {
    /// Begins. Says by [`is_real_time`](Self::is_real_time) whether the priority was to be had.
    pub fn begin() -> RealTimeSection {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut signals_before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigfillset writes a whole set. pthread_sigmask reads it and writes the one before; it cannot fail
        // with these arguments.
        let signals_before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigemptyset(signals_before.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), signals_before.as_mut_ptr());
            signals_before.assume_init()
        };
        RealTimeSection { signals_before, schedule_before: become_real_time(), _not_sent: std::marker::PhantomData }
    }

    /// Whether ordinary processes cannot preempt it.
    pub fn is_real_time(&self) -> bool {
        self.schedule_before.is_some()
    }
}

/// Gives this thread the first-in-first-out schedule; says how it was scheduled before.
fn become_real_time() -> Option<(libc::c_int, libc::sched_param)> {
    let mut before = libc::sched_param { sched_priority: 0 };
    let wanted = libc::sched_param { sched_priority: PRIORITY };
    // SAFETY: 0 is the calling thread; the structures are whole and live until the calls return.
    let policy = unsafe {
        let policy = libc::sched_getscheduler(0);
        let known = policy >= 0 && libc::sched_getparam(0, &raw mut before) == 0;
        let done =
            known && libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const wanted) == 0;
        done.then_some(policy)
    };
    policy.map(|policy| (policy, before))
}

impl Drop for RealTimeSection {
    fn drop(&mut self) {
        // SAFETY: as in `begin`; both were given by the kernel for this thread.
        unsafe {
            if let Some((policy, parameters)) = &self.schedule_before {
                libc::sched_setscheduler(0, *policy, &raw const *parameters);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.signals_before, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    fn blocked_signals() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("read");
        status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).expect("a line").to_owned()
    }

    #[test]
    fn memory_is_kept_until_the_last_one_ends() {
        let locked = || {
            let status = std::fs::read_to_string("/proc/self/status").expect("read");
            status.lines().find_map(|line| line.strip_prefix("VmLck:")).is_some_and(|rest| !rest.contains(" 0 kB"))
        };
        let (first, second) = (LockedMemory::begin(), LockedMemory::begin());
        assert_eq!(locked(), first.0);
        let was_kept = second.0;
        drop(first);
        assert_eq!(locked(), was_kept);
        drop(second);
        assert!(!locked());
    }

    #[test]
    fn everything_is_as_before_when_it_ends() {
        let (policy_before, signals_before) = (policy(), blocked_signals());
        let kept = LockedMemory::begin();
        let urgent = RealTimeSection::begin();
        assert_ne!(blocked_signals(), signals_before);
        assert_eq!(policy() & libc::SCHED_FIFO == libc::SCHED_FIFO, urgent.is_real_time());
        drop(urgent);
        drop(kept);
        assert_eq!((policy(), blocked_signals()), (policy_before, signals_before));
    }
}
