//! Inspects tasks and checks whether this host could run a task, for a migration or a placement
//! query. No task is frozen or changed.

use crate::migrations::NO_NAMESPACES;
use crate::supervisor::Supervisor;
use crate::workers::WorkerResult;
use checkpoint::engine::CancelHandle;
use checkpoint::facts::{self, TaskProcesses, ThisHost};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, MigrationId, RequestId, Tid};

/// The reason for an inspection or a feasibility check. It determines the message in which the
/// result is reported.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Requester {
    /// A migration of this task.
    Migration { migration: MigrationId, tid: Tid },
    /// A placement query, without a migration. The value is the id of the query.
    Query(RequestId),
}

/// True for orders that are answered only after the engine has been probed.
pub(crate) fn needs_engine(order: &ToTasker) -> bool {
    use ToTasker as T;
    matches!(
        order,
        T::Inspect { .. } | T::QueryInspect { .. } | T::Prepare { .. } | T::QueryVerdict { .. }
    )
}

impl Supervisor {
    fn engine_refusal(&self) -> Option<Refusal> {
        // The tasker does not know the id of its host; the daemon replaces it.
        self.migrations
            .engine_state()
            .err()
            .map(|why| Refusal::NoEngine {
                host: HostId::MASTER,
                why,
            })
    }

    /// Inspects a task on a worker thread. [`Supervisor::on_inspected`] handles the result.
    pub(crate) fn inspect(&mut self, requester: Requester, tid: Tid) {
        let refused = match (self.tasks.get(&tid), self.engine_refusal()) {
            (None, _) => Some(Refusal::NoSuchTask),
            (Some(_), no_engine) => no_engine,
        };
        let namespace = self
            .tasks
            .get(&tid)
            .and_then(|task| task.namespace.as_ref().map(|n| (n, task.process.pid)));
        let (None, Some((namespace, pid))) = (&refused, namespace) else {
            let refused = refused.unwrap_or(Refusal::UnsupportedResource {
                what: NO_NAMESPACES.into(),
            });
            return self.on_inspected(requester, Err(refused));
        };
        let subject = TaskProcesses {
            root: pid,
            processes: namespace.pids(),
        };
        let engine = self.migrations.engine_state().unwrap_or_default();
        let hashes = self.migrations.hashes.clone();
        let work = move || WorkerResult::Inspected {
            requester,
            result: facts::inspect(&subject, engine, &hashes),
        };
        if let Err(why) = self.start_uncancelled(work) {
            self.on_inspected(
                requester,
                Err(Refusal::UnsupportedResource {
                    what: format!("something that could not be looked at: {why}"),
                }),
            );
        }
    }

    /// Reports the result of an inspection to the daemon.
    pub(crate) fn on_inspected(
        &mut self,
        requester: Requester,
        result: Result<TaskFacts, Refusal>,
    ) {
        self.send(&match requester {
            Requester::Migration { migration, tid } => {
                let facts = result.as_ref().ok();
                let memory_can_follow =
                    facts.is_some_and(|facts| self.migrations.post_copies.applies_to(facts));
                let can_pre_copy =
                    facts.is_some_and(|facts| self.migrations.pre_copies.applies_to(tid, facts));
                FromTasker::Inspected {
                    migration,
                    result,
                    supports_post_copy: memory_can_follow,
                    supports_pre_copy: can_pre_copy,
                }
            }
            Requester::Query(question) => FromTasker::QueryInspected {
                query: question,
                result,
            },
        });
    }

    /// Checks on a worker thread whether this host could run a task. [`Supervisor::on_verdict`]
    /// handles the result.
    pub(crate) fn check_feasibility(&mut self, requester: Requester, facts: TaskFacts) {
        if let Some(refusal) = self.engine_refusal() {
            return self.on_verdict(requester, vec![refusal]);
        }
        // Memory is also reserved for tasks that are being checked: if two tasks do not fit
        // together, only one may be accepted.
        let reserved_bytes = self.reserved_bytes();
        if let Requester::Migration { migration, .. } = requester {
            self.migrations
                .reservations
                .reserve(migration, facts.resident_bytes);
        }
        let host = ThisHost::new(self.migrations.hashes.clone(), reserved_bytes);
        let work = move || WorkerResult::Judged {
            requester,
            verdict: facts::judge_task(&facts, &host),
        };
        if let Err(why) = self.start_uncancelled(work) {
            self.on_verdict(requester, vec![cannot_check(&why)]);
        }
    }

    /// Reports the verdict to the daemon. If the task of a migration is accepted, the host waits
    /// for its images.
    pub(crate) fn on_verdict(&mut self, requester: Requester, mut verdict: Verdict) {
        let reply = match requester {
            Requester::Query(question) => FromTasker::QueryVerdict {
                query: question,
                verdict,
            },
            Requester::Migration { migration, tid } => {
                if verdict.is_empty()
                    && let Err(why) = self.reserve_target(migration, tid)
                {
                    verdict.push(cannot_check(&why));
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
    }

    /// Starts `work` on a worker thread that cannot be cancelled. Returns the id of the worker.
    pub(crate) fn start_uncancelled(
        &mut self,
        work: impl FnOnce() -> WorkerResult + Send + 'static,
    ) -> Result<u64, Failure> {
        let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
        self.migrations.workers.start(&cancel, None, work)
    }
}

fn cannot_check(why: &Failure) -> Refusal {
    Refusal::NoEngine {
        host: HostId::MASTER,
        why: why.to_string(),
    }
}
