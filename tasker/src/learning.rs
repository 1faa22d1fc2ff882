//! Programs and libraries of tasks are read and hashed a moment after a task has begun, by a thread behind others. Else that would be
//! done when its task is to move, from a disk if little of them is in use: an owner would wait for it.

use crate::sys;
use checkpoint::facts::{HashCache, learn};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Tasks that wait to be looked at; with more nobody loses anything but time.
const WAITING_MAX: usize = 256;
/// A program has found its libraries by then.
const BEGUN_AFTER: Duration = Duration::from_secs(1);
/// How urgent that is.
const NICE: i32 = 10;

/// What tells the thread of new tasks. It ends with this.
#[derive(Debug)]
pub(crate) struct Learning(SyncSender<i32>);

impl Learning {
    /// For files that are known here.
    pub(crate) fn new(hashes: Arc<HashCache>) -> Learning {
        let (tell, told) = sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("learning".into());
        // Without a thread they are hashed when they have to be; likewise below.
        let _ = thread.spawn(move || learn_of_all(&told, &hashes));
        Learning(tell)
    }

    /// This process has begun.
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
            .for_each(|pid| learn(pid, hashes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_files_of_a_process_that_has_begun_are_known_a_moment_later() {
        let hashes = Arc::new(HashCache::default());
        let learning = Learning::new(hashes.clone());
        learning.begun(i32::MAX);
        learning.begun(std::process::id() as i32);
        let program = std::env::current_exe().expect("it has one");
        let until = Instant::now() + Duration::from_secs(60);
        while !hashes.knows(&program) {
            assert!(
                Instant::now() < until,
                "nobody has read {}",
                program.display()
            );
            std::thread::yield_now();
        }
    }
}
