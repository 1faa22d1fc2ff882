//! The calls that the service makes to the simulated virtual machine.

use super::{MIGRATION_DURATION, ReplayTask, Spawner, World, service_tid};
use crate::api::VmApi;
use bytes::Bytes;
use libpvm::{Error, MigrateError};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::MigrationCause;
use sempa_proto::sm::SM_SPAWN;
use sempa_proto::suspend;
use sempa_proto::table::{HostTable, TASK_FORKED, TaskInfo};
use sempa_proto::task::{NotifySubjects, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, PvmError, Tid};
use std::time::Duration;

impl VmApi for World {
    fn tid(&self) -> Tid {
        service_tid()
    }

    fn host(&self) -> HostId {
        HostId::MASTER
    }

    fn now(&self) -> Micros {
        self.0.borrow().now
    }

    fn wall_clock(&self) -> Micros {
        self.now()
    }

    fn recv(&self, span: Duration) -> Result<Option<Message>, Error> {
        let mut state = self.0.borrow_mut();
        let until = state.now + Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
        loop {
            if let Some(message) = state.inbox.pop_front() {
                return Ok(Some(message));
            }
            if state.is_over() {
                return Err(Error::new(PvmError::SysErr, "the record is over"));
            }
            let next = state.next_event_at();
            if next > until {
                state.advance(until);
                return Ok(None);
            }
            state.advance(next);
            state.process_due();
        }
    }

    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        if tag == SM_SPAWN {
            self.0.borrow_mut().record_answer((to, wid), body);
        }
        Ok(())
    }

    fn send_rm(&self, _to: Tid, _tag: i32, _wid: i32, _body: Bytes) -> Result<(), Error> {
        Ok(())
    }

    fn host_table(&self) -> Result<HostTable, Error> {
        Ok(self.0.borrow().table.clone())
    }

    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        let state = self.0.borrow();
        let plain = |tid: Tid, parent, host, uid| TaskInfo {
            tid,
            parent,
            host,
            flags: 0,
            name: String::new(),
            pid: 0,
            uid,
            migrating: false,
            paused: false,
            suspended: false,
        };
        let spawner = |(tid, s): (&Tid, &Spawner)| plain(*tid, s.parent, s.host, s.user);
        let running = |(tid, task): (&Tid, &ReplayTask)| TaskInfo {
            flags: TASK_FORKED,
            name: task.program.clone(),
            migrating: task.migrating.is_some(),
            suspended: task.suspended.is_suspended(),
            ..plain(*tid, task.parent, task.host, task.user)
        };
        Ok(state
            .spawners
            .iter()
            .map(spawner)
            .chain(state.tasks.iter().map(running))
            .collect())
    }

    fn register(&self) -> Result<Tid, Error> {
        Ok(Tid::NONE)
    }

    fn subscribe(&self, _ctx: i32, _tag: i32) -> Result<(), Error> {
        Ok(())
    }

    fn events(&self, _from: u64, _limit: u32) -> Result<Vec<Event>, Error> {
        Ok(Vec::new())
    }

    fn notify(&self, _what: NotifySubjects, _ctx: i32, _tag: i32) -> Result<(), Error> {
        Ok(())
    }

    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        Ok(self.0.borrow_mut().exec(host, parent, request))
    }

    fn migrate(&self, tid: Tid, to: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut state = self.0.borrow_mut();
        let at = state.now + MIGRATION_DURATION;
        match state.tasks.get_mut(&tid) {
            None => Err(Error::new(PvmError::NoTask, "it has ended").into()),
            Some(task) if task.migrating.is_some() => {
                Err(Error::new(PvmError::Already, "it is migrating").into())
            }
            Some(task) => {
                task.migrating = Some((at, to, cause));
                Ok(())
            }
        }
    }

    fn signal(&self, tid: Tid, _signal: i32) -> Result<(), Error> {
        self.0.borrow_mut().tasks.remove(&tid);
        Ok(())
    }

    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::SuspendCause) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let Some(task) = state.tasks.get_mut(&tid) else {
            return Err(Error::new(PvmError::NoTask, "it has ended"));
        };
        let (order, before, host) = (
            suspend::SuspendOrder {
                tid,
                suspend,
                cause,
            },
            task.suspended,
            task.host,
        );
        task.suspended = before.apply(&order);
        let change = before.change_event(task.suspended, &order);
        change
            .into_iter()
            .for_each(|event| state.event(host, event));
        Ok(())
    }

    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let at = state.now + MIGRATION_DURATION;
        state.vacates_due.insert(job, at);
        Ok(())
    }

    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        self.0.borrow_mut().restart(set, on)
    }

    fn record_event(&self, _at: Micros, _kind: EventKind) -> Result<(), Error> {
        Ok(())
    }
}
