//! Moving tasks: what the tasker does as source and as target of a move.

use crate::supervisor::Supervisor;
use crate::task::{Phase, Task};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::{Failure, Refusal};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, MigrationId};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

const NO_ENGINE: &str = "this tasker was built without a dump engine";

/// Moves under way on this host.
pub(crate) struct Moves {
    wake: EventFd,
}

impl Moves {
    pub(crate) fn new(_namespaces: bool) -> io::Result<Moves> {
        Ok(Moves { wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)? })
    }

    pub(crate) fn engine_state(&self) -> Result<String, String> {
        Err(NO_ENGINE.into())
    }

    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(crate) fn held(&self) -> impl Iterator<Item = (MigrationId, BorrowedFd<'_>)> {
        std::iter::empty()
    }

    pub(crate) fn waits_for(&self, _pid: i32) -> bool {
        false
    }

    pub(crate) fn is_idle(&self) -> bool {
        true
    }

    pub(crate) fn cancel_all(&mut self) {}
}

impl Supervisor {
    pub(crate) fn begin_trial(&mut self) {}

    pub(crate) fn hear_workers(&mut self) {}

    pub(crate) fn held_lost(&mut self, _migration: MigrationId) {}

    pub(crate) fn look_at_stopping(&mut self) {}

    pub(crate) fn abandon_move_of(&mut self, _task: &Task) {}

    pub(crate) fn obey_move(&mut self, order: ToTasker) {
        let refusal = Refusal::NoEngine { host: HostId::MASTER, why: NO_ENGINE.into() };
        let failure = Failure::Engine(NO_ENGINE.into());
        let answer = match order {
            ToTasker::Start(_) | ToTasker::Signal { .. } | ToTasker::Kill { .. } => return,
            ToTasker::Inspect { migration, .. } => FromTasker::Inspected { migration, result: Err(refusal) },
            ToTasker::Prepare { migration, .. } => FromTasker::Prepared { migration, verdict: vec![refusal] },
            ToTasker::Stop { migration, .. } => FromTasker::Stopped { migration, result: Err(failure) },
            ToTasker::Dump { migration, .. } => FromTasker::Dumped { migration, result: Err(failure) },
            ToTasker::Continue { migration, .. } => FromTasker::Continued { migration },
            ToTasker::KillMoved { migration, tid } => {
                if let Some(task) = self.tasks.get_mut(&tid) {
                    task.phase = Phase::Leaving { migration };
                    task.kill();
                }
                return;
            }
            ToTasker::Restore { migration, .. } => FromTasker::Restored { migration, result: Err(failure) },
            ToTasker::Run { migration, .. } => FromTasker::Ran { migration, result: Err(failure) },
            ToTasker::Discard { migration } => FromTasker::Discarded { migration },
        };
        self.say(&answer);
    }
}
