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
const QUEUED_PROCESSES_MAX: usize = 256;
/// Delay after which a program has loaded its libraries.
const HASH_DELAY: Duration = Duration::from_secs(1);
/// Nice value of the hashing thread.
const HASHER_NICE: i32 = 10;

/// Notifies the hashing thread of new tasks. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct BinaryHasher(SyncSender<i32>);

impl BinaryHasher {
    /// Starts the thread, which stores its results in `hashes`.
    pub(crate) fn new(hashes: Arc<HashCache>) -> BinaryHasher {
        let (sender, receiver) = sync_channel(QUEUED_PROCESSES_MAX);
        let thread = std::thread::Builder::new().name("learning".into());
        // Without the thread, files are hashed when they are needed; the same holds if the queue is
        // full.
        let _ = thread.spawn(move || hash_loop(&receiver, &hashes));
        BinaryHasher(sender)
    }

    /// Queues the files of a process that has just started.
    pub(crate) fn on_process_start(&self, pid: i32) {
        let _ = self.0.try_send(pid);
    }
}

fn hash_loop(receiver: &Receiver<i32>, hashes: &HashCache) {
    sys::set_nice(nix::unistd::gettid().as_raw(), HASHER_NICE);
    while let Ok(first) = receiver.recv() {
        std::thread::sleep(HASH_DELAY);
        std::iter::once(first)
            .chain(receiver.try_iter())
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
        let hasher = BinaryHasher::new(hashes.clone());
        hasher.on_process_start(i32::MAX);
        hasher.on_process_start(std::process::id() as i32);
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
