//! A CRIU that has dumped a task without its memory and hands that out: it keeps it in pipes, so that the task may be killed
//! before the last of it was asked for.

use super::process::Swrk;
use super::relay::Relay;
use super::rescue::Snapshot;
use crate::engine::{Limits, Memory, Serving};
use nix::sys::memfd::{MFdFlags, memfd_create};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What CRIU says when the images are written and it waits to be asked for memory.
pub(super) const READY: &str = "status-ready";

/// What a request has no word for: on which stream it will be asked.
pub(super) fn settings(asked_on: &OwnedFd) -> io::Result<OwnedFd> {
    let file = memfd_create(c"criu-settings", MFdFlags::MFD_CLOEXEC)?;
    writeln!(File::from(file.try_clone()?), "ps-socket {}", asked_on.as_raw_fd())?;
    Ok(file)
}

/// A dump whose images are complete.
pub(super) struct Serve {
    // Dropped, and ended, in this order.
    swrk: Swrk,
    relay: Option<Relay>,
    before: Option<Snapshot>,
    memory: Memory,
}

impl Serve {
    pub(super) fn new(swrk: Swrk, relay: Relay, before: Option<Snapshot>, asked_on: Arc<OwnedFd>) -> Serve {
        let memory = Memory { asked_on, tracing: relay.socket(), outlives: Arc::default() };
        Serve { swrk, relay: Some(relay), before, memory }
    }
}

impl Serving for Serve {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn memory(&self) -> Memory {
        self.memory.clone()
    }

    fn finish(mut self: Box<Self>, limits: &Limits) -> Result<(), Failure> {
        self.swrk.begin();
        let served = self.swrk.finish(limits);
        self.end(served.as_ref().err());
        served
    }
}

impl Serve {
    /// Ends what is left of the engine. If it has not put the task in order itself that is done here.
    fn end(&mut self, why: Option<&Failure>) {
        self.memory.withhold();
        self.swrk.kill();
        drop(self.relay.take());
        if let (Some(before), Some(why), false) =
            (self.before.take(), why, self.memory.outlives.load(Ordering::Acquire))
        {
            before.put_back_if(why);
        }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // Nothing is left to do after a regular end.
        self.end(Some(&Failure::CalledOff("nobody waits for it".into())));
    }
}
