//! Inspects tasks and checks whether this host could run a task, for a migration or a placement
//! query. No task is frozen or changed.

use crate::migrations::no_namespaces_reason;
use crate::supervisor::Supervisor;
use crate::target::claim_failure;
use crate::task_user::with_own_file_rights;
use crate::workers::WorkerResult;
use checkpoint::engine::CancelHandle;
use checkpoint::facts::{self, TaskProcesses, ThisHost};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, MigrationId, RequestId, Tid};

/// The reason why a task is refused that a signal has stopped: its library must write what it has,
/// and close its connections.
const STOPPED_BY_SIGNAL: &str = "been stopped by a signal (SIGSTOP), and must run to leave its \
                                 daemon; continue it with SIGCONT";

/// The request for which a task is inspected or this host is checked. The request determines which
/// message reports the result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Requester {
    /// A migration of this task.
    Migration { migration: MigrationId, tid: Tid },
    /// A placement query, without a migration. The value is the id of the query.
    Query(RequestId),
}

/// True if the order must be deferred while the engine is probed, because its reply depends on the
/// result of the probe.
pub(crate) fn depends_on_probe(order: &ToTasker) -> bool {
    use ToTasker as T;
    matches!(
        order,
        T::Inspect { .. } | T::QueryInspect { .. } | T::Prepare { .. } | T::QueryVerdict { .. }
    )
}

impl Supervisor {
    fn engine_refusal(&self) -> Option<Refusal> {
        // The id of this host is unknown to the tasker. The daemon replaces it.
        self.migrations
            .engine_state()
            .err()
            .map(|why| Refusal::NoEngine {
                host: HostId::MASTER,
                why: why.0,
            })
    }

    /// Inspects a task on a worker thread. [`Supervisor::on_inspected`] handles the result.
    pub(crate) fn start_inspection(&mut self, requester: Requester, tid: Tid) {
        let refusal = match (self.tasks.get(&tid), self.engine_refusal()) {
            (None, _) => Some(Refusal::NoSuchTask),
            (Some(task), None) if task.is_stopped_by_signal() => {
                Some(Refusal::UnsupportedResource {
                    what: STOPPED_BY_SIGNAL.into(),
                })
            }
            (Some(_), refusal_by_engine) => refusal_by_engine,
        };
        let namespace = self
            .tasks
            .get(&tid)
            .and_then(|task| task.namespace.as_ref().map(|n| (n, task.process.pid)));
        let (None, Some((namespace, pid))) = (&refusal, namespace) else {
            let refusal = refusal.unwrap_or(Refusal::UnsupportedResource {
                what: no_namespaces_reason().into(),
            });
            return self.on_inspected(requester, Err(refusal));
        };
        let task_processes = TaskProcesses {
            root_pid: pid,
            processes: namespace.pids(),
            engine_place: self.task_start_state.engine_place(),
            // A pipe may join processes of two users.
            with_host_view: |action| with_own_file_rights(action),
        };
        let engine = self.migrations.engine_state().unwrap_or_default();
        let hashes = self.migrations.hash_cache.clone();
        let work = move || WorkerResult::Inspected {
            requester,
            result: facts::inspect(&task_processes, engine, &hashes),
        };
        if let Err(why) = self.start_uncancellable(work) {
            self.on_inspected(
                requester,
                Err(Refusal::UnsupportedResource {
                    what: format!("something that could not be inspected: {why}"),
                }),
            );
        }
    }

    /// Reports the result of an inspection to the daemon, and for a migration whether post-copy and
    /// pre-copy are possible.
    pub(crate) fn on_inspected(
        &mut self,
        requester: Requester,
        result: Result<TaskFacts, Refusal>,
    ) {
        let inspected_migration = match requester {
            Requester::Migration { migration, tid } if result.is_ok() => Some((migration, tid)),
            _ => None,
        };
        self.send(&match requester {
            Requester::Migration { migration, tid } => {
                let facts = result.as_ref().ok();
                let supports_post_copy =
                    facts.is_some_and(|facts| self.migrations.post_copies.is_used_for(facts));
                let supports_pre_copy =
                    facts.is_some_and(|facts| self.migrations.pre_copies.is_used_for(tid, facts));
                FromTasker::Inspected {
                    migration,
                    result,
                    supports_post_copy,
                    supports_pre_copy,
                }
            }
            Requester::Query(query) => FromTasker::QueryInspected { query, result },
        });
        if let Some((migration, tid)) = inspected_migration {
            self.start_idle_dump(migration, tid);
        }
    }

    /// Checks on a worker thread whether this host could run a task. [`Supervisor::on_verdict`]
    /// handles the result.
    pub(crate) fn start_feasibility_check(&mut self, requester: Requester, facts: TaskFacts) {
        if let Some(refusal) = self.engine_refusal() {
            return self.on_verdict(requester, vec![refusal]);
        }
        // Memory is also reserved for tasks that are being checked: if there is memory for only one
        // of two tasks, only one may be accepted.
        let reserved_bytes = self.reserved_bytes();
        if let Requester::Migration { migration, .. } = requester {
            self.migrations
                .reservations
                .reserve(migration, facts.memory_bytes);
        }
        let host = ThisHost::new(
            self.migrations.hash_cache.clone(),
            reserved_bytes,
            self.pid_numbering
                .map_or(u32::MAX, |numbering| numbering.pid_limit),
        );
        let work = move || WorkerResult::FeasibilityChecked {
            requester,
            verdict: facts::decide_verdict(&facts, &host),
        };
        if let Err(why) = self.start_uncancellable(work) {
            self.on_verdict(requester, vec![check_failed_refusal(&why)]);
        }
    }

    /// Reports the verdict to the daemon. If the task of a migration is accepted, the tasker
    /// prepares a namespace for it.
    pub(crate) fn on_verdict(&mut self, requester: Requester, mut verdict: Verdict) {
        let reply = match requester {
            Requester::Query(query) => {
                if verdict.is_empty()
                    && let Err(error) = self.check_arrival()
                {
                    verdict = refusals(claim_failure(error));
                }
                FromTasker::QueryVerdict { query, verdict }
            }
            Requester::Migration { migration, tid } => {
                if verdict.is_empty()
                    && let Err(why) = self.prepare_target(migration, tid)
                {
                    verdict = refusals(why);
                }
                self.migrations
                    .reservations
                    .record_verdict(migration, verdict.is_empty());
                FromTasker::Prepared {
                    migration,
                    verdict,
                    supports_post_copy: self.migrations.post_copies.is_available(),
                }
            }
        };
        self.send(&reply);
        if let Requester::Migration { migration, .. } = requester {
            self.start_idle_restore(migration);
        }
    }

    /// Starts `work` on a worker thread that cannot be cancelled. Returns the id of the worker.
    pub(crate) fn start_uncancellable(
        &mut self,
        work: impl FnOnce() -> WorkerResult + Send + 'static,
    ) -> Result<u64, Failure> {
        let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
        self.migrations.workers.start_worker(&cancel, None, work)
    }
}

/// Returns the refusals that a failure consists of, or the failure as a refusal.
fn refusals(failure: Failure) -> Verdict {
    match failure {
        Failure::Refused(verdict) => verdict,
        failure => vec![check_failed_refusal(&failure)],
    }
}

fn check_failed_refusal(why: &Failure) -> Refusal {
    Refusal::NoEngine {
        host: HostId::MASTER,
        why: why.to_string(),
    }
}
