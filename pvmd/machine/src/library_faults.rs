//! Tells the spawner and the event log of tasks whose programs use a wrong shared library or lack
//! one. Such a program fails without a word about the virtual machine.

use super::Machine;
use super::tasks::{ConnectionPhase, Task};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::library_fault::{ForeignLibrary, LoadFailure};
use sempa_proto::task::Sink;

impl Machine {
    /// Handles the report that a process of a task uses the library of another PVM. Each call of
    /// the program connects again, so a task is reported once.
    pub(super) fn handle_foreign_library(&mut self, spawn_token: i32, fault: ForeignLibrary) {
        let Some(task) = self.tasks.get_by_spawn_token(spawn_token) else {
            return;
        };
        if std::mem::replace(&mut task.has_foreign_library, true) {
            return;
        }
        let (tid, sink) = (task.tid, task.output_sink);
        let host = self.config.host;
        self.report_library_fault(tid, sink, EventKind::ForeignLibrary { host, tid, fault });
    }

    /// Remembers the dynamic loader's message that a library could not be loaded. Only a task that
    /// has not connected can fail for this reason.
    pub(super) fn look_for_load_failure(&mut self, tid: Tid, output: &[u8]) {
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.connection_phase == ConnectionPhase::Expected)
        else {
            return;
        };
        if let Some(failure) = LoadFailure::find_in(output) {
            task.load_failure = Some(failure);
        }
    }

    /// Reports a task that has ended because the dynamic loader could not load a library. Must be
    /// called before the end of the task's output is reported.
    pub(super) fn report_load_failure(&mut self, task: &Task, status: i32) {
        if let Some(failure) = &task.load_failure
            && status == LoadFailure::WAIT_STATUS
        {
            let event = EventKind::LibraryMissing {
                host: self.config.host,
                tid: task.tid,
                failure: failure.clone(),
            };
            self.report_library_fault(task.tid, task.output_sink, event);
        }
    }

    /// Records the event. The same sentence becomes a line of the task's output.
    fn report_library_fault(&mut self, tid: Tid, sink: Sink, event: EventKind) {
        let name_of = |host| self.table.get(host).map(|entry| entry.name.as_str());
        let sentence = event.with_host_names(name_of);
        self.send_task_output(tid, sink, format!("Sempa: {sentence}\n").into_bytes());
        self.record_event(event);
    }
}
