//! Hashes the programs and libraries of new tasks shortly after their start, on a thread of low
//! priority.
//!
//! Without this module a migration hashes the files first. If few of their pages are in memory, it
//! reads the files from the disk while an owner waits for the task to depart.

use crate::sys;
use checkpoint::facts::{HashCache, hash_program_files};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Maximum number of processes that are queued for hashing. The files of further processes are
/// hashed by their first migration.
const QUEUED_PROCESSES_MAX: usize = 256;
/// Delay from the start of a process until its files are hashed. After this delay most programs
/// have loaded their libraries.
const HASH_DELAY: Duration = Duration::from_secs(1);
/// Nice value of the hashing thread.
const HASHER_NICE: i32 = 10;

/// Queues new processes for the hashing thread. The thread ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct BinaryHasher(SyncSender<i32>);

impl BinaryHasher {
    /// Starts the hashing thread, which stores its results in `hashes`.
    pub(crate) fn new(hashes: Arc<HashCache>) -> Self {
        let (sender, receiver) = sync_channel(QUEUED_PROCESSES_MAX);
        let thread = std::thread::Builder::new().name("learning".into());
        // If the thread cannot be started or the queue is full, files are hashed when they are
        // needed.
        let _ = thread.spawn(move || hash_queued_processes(&receiver, &hashes));
        Self(sender)
    }

    /// Queues the process `pid`, which has just started, for hashing of its program and libraries.
    pub(crate) fn enqueue_process(&self, pid: i32) {
        let _ = self.0.try_send(pid);
    }
}

fn hash_queued_processes(receiver: &Receiver<i32>, hashes: &HashCache) {
    sys::set_nice(nix::unistd::gettid().as_raw(), HASHER_NICE);
    while let Ok(first_pid) = receiver.recv() {
        std::thread::sleep(HASH_DELAY);
        std::iter::once(first_pid)
            .chain(receiver.try_iter())
            .for_each(|pid| hash_program_files(pid, hashes));
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
        hasher.enqueue_process(i32::MAX);
        hasher.enqueue_process(std::process::id() as i32);
        let program = std::env::current_exe().expect("it has one");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !hashes.contains(&program) {
            assert!(
                Instant::now() < deadline,
                "nobody has read {}",
                program.display()
            );
            std::thread::yield_now();
        }
    }
}
