//! Placement queries: which hosts would accept a task (`Request::CanMigrate`). Nothing is frozen,
//! and nothing changes anywhere.
//!
//! 1. The requesting task's daemon asks the host of the task to inspect it.
//! 2. The requesting task's daemon sends the task's properties to all candidate hosts at the same
//!    time and asks for their verdicts.
//! 3. On each candidate host, the daemon checks the policy of the host's owner, and the tasker
//!    checks everything else.
//! 4. When all hosts have answered, or after `PLACEMENT_QUERY_TIMEOUT`, the requesting task gets
//!    the reply.

use super::restart_engine::{RestartVerdict, WorldCall, choose_engine};
use super::rpc::{ReplyAddress, RpcPurpose};
use super::{Machine, Timer};
use sempa_proto::engine::Engine;
use sempa_proto::host::{HostReply, HostRequest};
use sempa_proto::migration::{MigrationTargets, Refusal, TaskFacts, Verdict};
use sempa_proto::task::Reply;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of open queries of one daemon; further queries are refused.
const PLACEMENT_QUERIES_MAX: usize = 64;
/// Time limit for all answers. A tasker that has just started tests its engine before it answers,
/// and each tasker reads executables that are new to it.
const PLACEMENT_QUERY_TIMEOUT: Micros = Micros::from_secs(30);

/// A placement query that a task of this host has made and that is not answered yet.
#[derive(Debug)]
struct PlacementQuery {
    requester: Tid,
    request_id: RequestId,
    task: Tid,
    source: HostId,
    resident_bytes: u64,
    /// Hosts that have not answered.
    unanswered_hosts: BTreeSet<HostId>,
    verdicts: BTreeMap<HostId, Verdict>,
    engines: Vec<(HostId, Engine)>,
}

/// The open queries of this host's tasks, and the requests to this host's tasker on behalf of any
/// daemon.
#[derive(Debug, Default)]
pub(super) struct PlacementQueries {
    open_queries: BTreeMap<u64, PlacementQuery>,
    last_query_number: u64,
    /// Requests that the tasker has not answered, by the id of the request.
    tasker_requests: BTreeMap<RequestId, TaskerRequest>,
    last_tasker_request_id: RequestId,
}

/// A request to the tasker, with its requester.
#[derive(Debug)]
enum TaskerRequest {
    Inspect(ReplyAddress, Tid),
    /// A request for the tasker's verdict, with the daemon's own objections and the verdict of the
    /// restart engine.
    Verdict(ReplyAddress, Verdict, RestartVerdict),
}

impl PlacementQueries {
    fn add_tasker_request(&mut self, request: TaskerRequest) -> RequestId {
        self.last_tasker_request_id = self.last_tasker_request_id.next();
        self.tasker_requests
            .insert(self.last_tasker_request_id, request);
        self.last_tasker_request_id
    }
}

impl Machine {
    /// Starts a query of the task `requester`: which hosts would accept `task`, or, if
    /// `target_name` is a host name, whether that host would.
    pub(super) fn start_placement_query(
        &mut self,
        requester: Tid,
        id: RequestId,
        task: Tid,
        target_name: Option<&str>,
    ) {
        if self.placement_queries.open_queries.len() >= PLACEMENT_QUERIES_MAX {
            let reason = format!(
                "{PLACEMENT_QUERIES_MAX} such queries are waiting for answers already; try again later"
            );
            return self.reply_error(requester, id, PvmError::OutOfRes, reason);
        }
        let candidates = match target_name.map(|name| self.host_by_name(name)) {
            Some(None) => {
                let reason = format!(
                    "{task} cannot migrate to {}: {}",
                    target_name.unwrap_or_default(),
                    Refusal::NoSuchHost
                );
                return self.reply_error(requester, id, PvmError::NoHost, reason);
            }
            Some(Some(host)) => BTreeSet::from([host]),
            None => self.table.hosts.iter().map(|host| host.id).collect(),
        };
        let Some(source) = self
            .location(task)
            .filter(|host| task.is_task() && self.table.get(*host).is_some())
        else {
            return self.reply(
                requester,
                id,
                Reply::MigrationTargets(Err(Refusal::NoSuchTask)),
            );
        };
        self.placement_queries.last_query_number += 1;
        let query_number = self.placement_queries.last_query_number;
        let placement_query = PlacementQuery {
            requester,
            request_id: id,
            task,
            source,
            resident_bytes: 0,
            unanswered_hosts: candidates,
            verdicts: BTreeMap::new(),
            engines: Vec::new(),
        };
        self.placement_queries
            .open_queries
            .insert(query_number, placement_query);
        self.set_timer(
            PLACEMENT_QUERY_TIMEOUT,
            Timer::PlacementQueryTimeout(query_number),
        );
        self.call_host_of_task(
            task,
            HostRequest::Inspect { tid: task },
            RpcPurpose::Inspection(query_number),
        );
    }

    /// Handles the properties of the task, or the reason why it cannot migrate at all. Requests the
    /// verdicts of the candidate hosts. `result` is `None` if the host of the task is lost.
    pub(super) fn handle_query_facts(
        &mut self,
        query_number: u64,
        source: HostId,
        result: Option<Result<TaskFacts, Refusal>>,
    ) {
        let Some(placement_query) = self.placement_queries.open_queries.get_mut(&query_number)
        else {
            return;
        };
        let facts = match result.unwrap_or(Err(Refusal::HostLost(placement_query.source))) {
            Ok(facts) => facts,
            Err(refusal) => return self.reply_placement_query(query_number, Err(refusal)),
        };
        (placement_query.source, placement_query.resident_bytes) = (source, facts.memory_bytes);
        placement_query.unanswered_hosts.remove(&source);
        let hosts: Vec<HostId> = placement_query.unanswered_hosts.iter().copied().collect();
        if hosts.is_empty() {
            return self.complete_placement_query(query_number);
        }
        for host in hosts {
            let verdict_request = HostRequest::Verdict {
                facts: facts.clone(),
            };
            self.call_host(
                host,
                verdict_request,
                RpcPurpose::Verdict { query_number, host },
            );
        }
    }

    /// Handles the verdict of a candidate host. `reply` is `None` if the host is lost.
    pub(super) fn handle_query_verdict(
        &mut self,
        query_number: u64,
        host: HostId,
        reply: Option<(Verdict, Engine)>,
    ) {
        let Some(placement_query) = self.placement_queries.open_queries.get_mut(&query_number)
        else {
            return;
        };
        if placement_query.unanswered_hosts.remove(&host) {
            let (verdict, engine) =
                reply.unwrap_or_else(|| (vec![Refusal::HostLost(host)], Engine::Criu));
            placement_query
                .engines
                .extend(verdict.is_empty().then_some((host, engine)));
            placement_query.verdicts.insert(host, verdict);
        }
        if placement_query.unanswered_hosts.is_empty() {
            self.complete_placement_query(query_number);
        }
    }

    /// Completes a query at its time limit. Hosts that have not answered count as lost.
    pub(super) fn handle_placement_query_timeout(&mut self, query_number: u64) {
        let Some(placement_query) = self.placement_queries.open_queries.get_mut(&query_number)
        else {
            return;
        };
        if placement_query.verdicts.is_empty()
            && placement_query
                .unanswered_hosts
                .contains(&placement_query.source)
        {
            let source = placement_query.source;
            return self.reply_placement_query(query_number, Err(Refusal::HostLost(source)));
        }
        for host in std::mem::take(&mut placement_query.unanswered_hosts) {
            placement_query
                .verdicts
                .insert(host, vec![Refusal::HostLost(host)]);
        }
        self.complete_placement_query(query_number);
    }

    fn complete_placement_query(&mut self, query_number: u64) {
        let Some(placement_query) = self.placement_queries.open_queries.get_mut(&query_number)
        else {
            return;
        };
        let (tid, source, resident_bytes) = (
            placement_query.task,
            placement_query.source,
            placement_query.resident_bytes,
        );
        let mut verdicts: Vec<(HostId, Verdict)> = std::mem::take(&mut placement_query.verdicts)
            .into_iter()
            .collect();
        let engines = std::mem::take(&mut placement_query.engines);
        let zone_of = |host: HostId| {
            self.table
                .get(host)
                .map(sempa_proto::table::HostEntry::network_zone)
        };
        let source_zone = zone_of(source);
        verdicts.sort_by_key(|(host, _)| (zone_of(*host) != source_zone, *host));
        self.reply_placement_query(
            query_number,
            Ok(MigrationTargets {
                tid,
                from: source,
                memory_bytes: resident_bytes,
                verdicts,
                usable_engines: engines,
            }),
        );
    }

    fn reply_placement_query(
        &mut self,
        query_number: u64,
        result: Result<MigrationTargets, Refusal>,
    ) {
        if let Some(placement_query) = self.placement_queries.open_queries.remove(&query_number) {
            self.reply(
                placement_query.requester,
                placement_query.request_id,
                Reply::MigrationTargets(result),
            );
        }
    }

    // ---- requests of other daemons about this host and its tasks

    /// Inspects a task of this host for a query. The result is sent to the requester, immediately
    /// or when the tasker has inspected the task.
    pub(super) fn inspect_for_query(&mut self, reply_to: ReplyAddress, tid: Tid) {
        let departing_source = self
            .migrations
            .sources
            .values()
            .find(|source| source.migration().tid == tid && source.is_departing());
        let refusal = departing_source
            .map(|source| Refusal::AlreadyMigrating(source.migration().id))
            .or_else(|| self.migration_refusal(tid));
        if let Some(refusal) = refusal {
            return self.send_host_reply(reply_to, HostReply::Inspected(Err(refusal)));
        }
        if let Some(result) = self.inspect_without_criu(tid, None) {
            return self.send_host_reply(
                reply_to,
                HostReply::Inspected(self.add_program_name(tid, result)),
            );
        }
        let tasker_request_id = self
            .placement_queries
            .add_tasker_request(TaskerRequest::Inspect(reply_to, tid));
        self.send_to_tasker(ToTasker::QueryInspect {
            query: tasker_request_id,
            tid,
        });
    }

    /// Adds the name of a task's program to the task's properties, because the owner of another
    /// host may forbid the program.
    pub(super) fn add_program_name(
        &self,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        let program = self
            .tasks
            .get(tid)
            .map(|task| task.name.as_str().into())
            .unwrap_or_default();
        result.map(|facts| TaskFacts { program, ..facts })
    }

    /// Starts to determine whether this host would accept a task with these properties. The verdict
    /// is sent to the requester later.
    pub(super) fn start_query_verdict(&mut self, reply_to: ReplyAddress, facts: TaskFacts) {
        let objections: Verdict = self
            .guest_refusal(Tid::NONE, &facts.program)
            .into_iter()
            .chain(self.no_tasker_refusal())
            .collect();
        if self.tasker_has_ended {
            return self.answer_verdict(reply_to, objections, Engine::Criu);
        }
        self.world_calls
            .push_back(WorldCall::QueryVerdict(reply_to, objections, facts));
    }

    /// Asks the tasker for its objections to a migration by CRIU.
    pub(super) fn request_tasker_verdict(
        &mut self,
        reply_to: ReplyAddress,
        objections: Verdict,
        restart_verdict: RestartVerdict,
        facts: TaskFacts,
    ) {
        let tasker_request_id = self
            .placement_queries
            .add_tasker_request(TaskerRequest::Verdict(
                reply_to,
                objections,
                restart_verdict,
            ));
        self.send_to_tasker(ToTasker::QueryVerdict {
            query: tasker_request_id,
            facts,
        });
    }

    /// Sends the verdict of this host to the requester.
    pub(super) fn answer_verdict(
        &mut self,
        reply_to: ReplyAddress,
        verdict: Verdict,
        engine: Engine,
    ) {
        self.send_host_reply(reply_to, HostReply::Verdict(verdict, engine));
    }

    /// Handles the result of the tasker's inspection of a task.
    pub(super) fn handle_tasker_inspection(
        &mut self,
        tasker_request_id: RequestId,
        result: Result<TaskFacts, Refusal>,
    ) {
        if let Some(TaskerRequest::Inspect(reply_to, tid)) = self
            .placement_queries
            .tasker_requests
            .remove(&tasker_request_id)
        {
            let result = result.map_err(|refusal| self.set_refusal_host(refusal));
            let result = self.merge_criu_facts(tid, None, result);
            self.send_host_reply(
                reply_to,
                HostReply::Inspected(self.add_program_name(tid, result)),
            );
        }
    }

    /// Handles the tasker's verdict on a task.
    pub(super) fn handle_tasker_verdict(&mut self, tasker_request_id: RequestId, verdict: Verdict) {
        if let Some(TaskerRequest::Verdict(reply_to, mut objections, restart_verdict)) = self
            .placement_queries
            .tasker_requests
            .remove(&tasker_request_id)
        {
            let verdict = verdict
                .into_iter()
                .map(|refusal| self.set_refusal_host(refusal))
                .collect();
            let (verdict, engine) = choose_engine(verdict, restart_verdict);
            objections.extend(verdict);
            self.answer_verdict(reply_to, objections, engine);
        }
    }

    /// Answers all open requests to the tasker with a refusal, because the tasker has ended.
    pub(super) fn fail_tasker_requests(&mut self) {
        let Some(refusal) = self.no_tasker_refusal() else {
            return;
        };
        for request in std::mem::take(&mut self.placement_queries.tasker_requests).into_values() {
            match request {
                TaskerRequest::Inspect(reply_to, _) => {
                    self.send_host_reply(reply_to, HostReply::Inspected(Err(refusal.clone())))
                }
                TaskerRequest::Verdict(reply_to, mut objections, _) => {
                    objections.push(refusal.clone());
                    self.answer_verdict(reply_to, objections, Engine::Criu);
                }
            }
        }
    }
}
