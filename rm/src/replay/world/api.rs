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

    fn recv(&self, timeout: Duration) -> Result<Option<Message>, Error> {
        let mut state = self.0.borrow_mut();
        let deadline = state.now + Micros(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX));
        loop {
            if let Some(message) = state.inbox.pop_front() {
                return Ok(Some(message));
            }
            if state.is_over() {
                return Err(Error::new(PvmError::SysErr, "the record is over"));
            }
            let next_event_time = state.next_event_at();
            if next_event_time > deadline {
                state.advance_to(deadline);
                return Ok(None);
            }
            state.advance_to(next_event_time);
            state.process_due_events();
        }
    }

    fn send(&self, receiver: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        if tag == SM_SPAWN {
            self.0
                .borrow_mut()
                .record_spawn_reply((receiver, wid), body);
        }
        Ok(())
    }

    fn send_rm(&self, _to: Tid, _tag: i32, _wid: i32, _body: Bytes) -> Result<(), Error> {
        Ok(())
    }

    fn host_table(&self) -> Result<HostTable, Error> {
        Ok(self.0.borrow().host_table.clone())
    }

    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        let state = self.0.borrow();
        let unspawned_task_info = |tid: Tid, parent, host, uid| TaskInfo {
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
            namespace_pid: 0,
            stopping: false,
            leftover_processes: 0,
        };
        let spawner_info =
            |(tid, s): (&Tid, &Spawner)| unspawned_task_info(*tid, s.parent, s.host, s.user);
        let replay_task_info = |(tid, task): (&Tid, &ReplayTask)| TaskInfo {
            flags: TASK_FORKED,
            name: task.program.clone(),
            migrating: task.migration.is_some(),
            suspended: task.suspensions.is_suspended(),
            ..unspawned_task_info(*tid, task.parent, task.host, task.user)
        };
        Ok(state
            .spawners
            .iter()
            .map(spawner_info)
            .chain(state.tasks.iter().map(replay_task_info))
            .collect())
    }

    fn register(&self) -> Result<Tid, Error> {
        Ok(Tid::NONE)
    }

    fn subscribe_events(&self, _ctx: i32, _tag: i32) -> Result<(), Error> {
        Ok(())
    }

    fn events(&self, _from: u64, _limit: u32) -> Result<Vec<Event>, Error> {
        Ok(Vec::new())
    }

    fn request_notification(
        &self,
        _what: NotifySubjects,
        _ctx: i32,
        _tag: i32,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        Ok(self.0.borrow_mut().start_tasks_on(host, parent, request))
    }

    fn migrate(&self, tid: Tid, target: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut state = self.0.borrow_mut();
        let arrival_time = state.now + MIGRATION_DURATION;
        match state.tasks.get_mut(&tid) {
            None => Err(Error::new(PvmError::NoTask, "it has ended").into()),
            Some(task) if task.migration.is_some() => {
                Err(Error::new(PvmError::Already, "it is migrating").into())
            }
            Some(task) => {
                task.migration = Some((arrival_time, target, cause));
                Ok(())
            }
        }
    }

    fn signal(&self, tid: Tid, _signal: i32) -> Result<(), Error> {
        self.0.borrow_mut().tasks.remove(&tid);
        Ok(())
    }

    fn set_suspended(
        &self,
        tid: Tid,
        suspend: bool,
        cause: suspend::SuspendCause,
    ) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let Some(task) = state.tasks.get_mut(&tid) else {
            return Err(Error::new(PvmError::NoTask, "it has ended"));
        };
        let (order, previous_suspensions, host) = (
            suspend::SuspendOrder {
                tid,
                suspend,
                cause,
            },
            task.suspensions,
            task.host,
        );
        task.suspensions = previous_suspensions.apply_order(&order);
        let change = previous_suspensions.change_event(task.suspensions, &order);
        change
            .into_iter()
            .for_each(|event| state.post_event(host, event));
        Ok(())
    }

    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let completion_time = state.now + MIGRATION_DURATION;
        state.vacates_due.insert(job, completion_time);
        Ok(())
    }

    fn restart(&self, checkpoint: &str, host_names: &[String]) -> Result<(), Error> {
        self.0.borrow_mut().restart(checkpoint, host_names)
    }

    fn record_event(&self, _at: Micros, _kind: EventKind) -> Result<(), Error> {
        Ok(())
    }
}
