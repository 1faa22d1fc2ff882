//! Hashes the programs and libraries of new tasks shortly after their start, on a thread of low
//! priority.
//!
//! Otherwise they would be hashed during a migration, from a disk if few of their pages are in
//! memory, and an owner would wait for it.

use crate::sys;
use checkpoint::facts::{HashCache, prehash};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Most tasks queued for hashing; further tasks are hashed when needed.
const WAITING_MAX: usize = 256;
/// Delay after which a program has loaded its libraries.
const BEGUN_AFTER: Duration = Duration::from_secs(1);
/// Nice value of the hashing thread.
const NICE: i32 = 10;

/// Notifies the hashing thread of new tasks. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Learning(SyncSender<i32>);

impl Learning {
    /// Starts the thread, which stores its results in `hashes`.
    pub(crate) fn new(hashes: Arc<HashCache>) -> Learning {
        let (tell, told) = sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("learning".into());
        // Without the thread, files are hashed when they are needed; the same holds if the queue is
        // full.
        let _ = thread.spawn(move || learn_of_all(&told, &hashes));
        Learning(tell)
    }

    /// Queues the files of a process that has just started.
    pub(crate) fn begun(&self, pid: i32) {
        let _ = self.0.try_send(pid);
    }
}

fn learn_of_all(told: &Receiver<i32>, hashes: &HashCache) {
    sys::set_nice(nix::unistd::gettid().as_raw(), NICE);
    while let Ok(first) = told.recv() {
        std::thread::sleep(BEGUN_AFTER);
        std::iter::once(first)
            .chain(told.try_iter())
            .for_each(|pid| prehash(pid, hashes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn files_of_a_new_process_are_hashed() {
        let hashes = Arc::new(HashCache::default());
        let learning = Learning::new(hashes.clone());
        learning.begun(i32::MAX);
        learning.begun(std::process::id() as i32);
        let program = std::env::current_exe().expect("it has one");
        let until = Instant::now() + Duration::from_secs(60);
        while !hashes.contains(&program) {
            assert!(
                Instant::now() < until,
                "nobody has read {}",
                program.display()
            );
            std::thread::yield_now();
        }
    }
}
