//! Client of the resource manager: requests that it may serve in place of the daemon (`SM_*`
//! messages).
//!
//! Each request goes to the resource manager if one is registered for this kind of request. If it
//! dies before it answers, the daemon serves the request. Only a spawn that was waiting for a free
//! slot is sent to the next resource manager.

use crate::error::Error;
use crate::runtime::{Core, Runtime};
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::message::{CTX_BASE, ENC_XDR, Message};
use sempa_proto::sm::{
    SM_ADDHOST, SM_CONFIG, SM_DELHOST, SM_NOTIFY, SM_SCHED, SM_SPAWN, SM_TASK, pack_spawn,
    unpack_tids,
};
use sempa_proto::table::{AddedHost, HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    NotifyRequest, NotifySubjects, Reply, Request, RmInfo, RmServices, SpawnRequest,
};
use sempa_proto::{Epoch, HostId, Micros, PvmError, PvmResult, Tid};
use std::time::{Duration, Instant};

pub const NOTIFY_TASK_EXIT: i32 = 1;
pub const NOTIFY_HOST_DELETE: i32 = 2;
pub const NOTIFY_HOST_ADD: i32 = 3;
/// `PvmNotifyCancel`, added to one of the other constants.
pub const NOTIFY_CANCEL: i32 = 256;

/// Outcome of a request to the resource manager.
enum RmOutcome {
    Answer(Bytes),
    /// No resource manager serves the request, or it died before it answered: use the daemon.
    UseDaemon,
    /// The resource manager died while the request had been waiting since this time. Nothing of it
    /// was begun: ask the next resource manager.
    RetryNext {
        dead: Tid,
        since: Micros,
    },
}

/// Request to a resource manager, before it is sent.
struct RmCallTarget {
    rm: Tid,
    /// Wait id of the request.
    wid: i32,
    /// Number of resource manager deaths before the request; `None` in a forked child.
    deaths_before: Option<u64>,
}

/// Time that a waiting spawn request waits for a new resource manager after the death of the old
/// one. The master starts one immediately, so none will come after this time.
const NEXT_RM_TIMEOUT: Duration = Duration::from_secs(10);

impl Runtime {
    /// Starts tasks. The resource manager places them if there is one, otherwise the daemon. If the
    /// resource manager has leased placements for such requests in advance
    /// ([`sempa_proto::sm::PlacementLease`]), it is not asked.
    ///
    /// If the resource manager dies before it answers, the daemon is asked; tasks that it had
    /// started keep running. A request that was waiting for a free slot continues to wait at the
    /// next resource manager, if one registers within ten seconds.
    ///
    /// The settings of the job file in the environment are added ([`crate::job`]).
    ///
    /// # Errors
    /// No task could be tried. Errors of single tasks are in their results.
    pub fn spawn(&self, mut request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        crate::job::apply_to_request(crate::job::from_process_env(), &mut request)?;
        let Some(mut results) = self.spawn_leased(&request) else {
            return self.spawn_unleased(request);
        };
        // The second attempt goes to the resource manager or the daemon, whose errors are returned.
        request.count = results.iter().filter(|result| result.is_err()).count() as u32;
        if request.count > 0
            && let Ok(rest) = self.spawn_unleased(request)
        {
            results
                .iter_mut()
                .filter(|result| result.is_err())
                .zip(rest)
                .for_each(|(result, other)| *result = other);
        }
        Ok(results)
    }

    /// Starts tasks without a placement lease.
    fn spawn_unleased(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let what = "spawning tasks";
        let mut waiting_since = None;
        while let Some(target) = self.rm_call_target(|serves| serves.spawn) {
            self.with_core_mut(|core, now| {
                core.placement_leases
                    .record_request(now, target.rm, target.wid, &request)
            });
            match self.call_rm_target(&target, SM_SPAWN, pack_spawn(&request, waiting_since))? {
                RmOutcome::Answer(body) => {
                    let results = unpack_tids(body).map_err(|e| rm_error(what, e))?;
                    if results.len() != request.count as usize {
                        return Err(rm_error(what, PvmError::Mismatch));
                    }
                    return Ok(results);
                }
                RmOutcome::RetryNext { dead, since } => {
                    waiting_since = Some(since);
                    self.wait_for_next_rm(dead);
                }
                RmOutcome::UseDaemon => break,
            }
        }
        match self.request(Request::Spawn(request)) {
            Reply::Spawned(results) => Ok(results),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Returns the host table. A resource manager sends it without addresses and epoch.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn config(&self) -> Result<HostTable, Error> {
        let what = "reading the host table";
        if let RmOutcome::Answer(body) =
            self.call_rm(|serves| serves.others, SM_CONFIG, Bytes::new)?
        {
            return unpack_config(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::Config) {
            Reply::Hosts(table) => Ok(table),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Returns the tasks that `selector` stands for: all ([`Tid::NONE`]), those of one host, or
    /// one.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let what = "listing tasks";
        let pack = || {
            let mut out = Packer::new(Encoding::Xdr);
            out.int(selector.raw());
            out.finish()
        };
        if let RmOutcome::Answer(body) = self.call_rm(|serves| serves.others, SM_TASK, pack)? {
            return unpack_tasks(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::Tasks { selector }) {
            Reply::Tasks(tasks) => Ok(tasks),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Adds hosts, each given as a host-file line, and returns one result for each line.
    ///
    /// # Errors
    /// No host could be tried.
    pub fn add_hosts(&self, lines: Vec<String>) -> Result<Vec<AddedHost>, Error> {
        let what = "adding hosts";
        if let RmOutcome::Answer(body) =
            self.call_rm(|serves| serves.others, SM_ADDHOST, || pack_names(&lines))?
        {
            let added = unpack_added(body).map_err(|e| rm_error(what, e))?;
            if added.len() != lines.len() {
                return Err(rm_error(what, PvmError::OutOfRes));
            }
            return Ok(added);
        }
        match self.request(Request::AddHosts { lines }) {
            Reply::HostsAdded(added) => Ok(added),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Removes hosts by name and returns one result for each name.
    ///
    /// # Errors
    /// No host could be tried.
    pub fn delete_hosts(&self, names: Vec<String>) -> Result<Vec<Result<(), PvmError>>, Error> {
        let what = "deleting hosts";
        if let RmOutcome::Answer(body) =
            self.call_rm(|serves| serves.others, SM_DELHOST, || pack_names(&names))?
        {
            return unpack_deleted(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::DelHosts { names }) {
            Reply::HostsDeleted(results) => Ok(results),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Requests messages about tasks that end, or hosts that join or leave. A resource manager
    /// sends no confirmation.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn notify(&self, request: NotifyRequest) -> Result<(), Error> {
        if let Some(rm) = self.rm_serving(|serves| serves.others) {
            let body = pack_notify(&request);
            let dst = rm.tid;
            let message = Message {
                src: self.tid(),
                dst,
                ctx: CTX_BASE,
                tag: SM_NOTIFY,
                wid: self.next_wid(),
                enc: ENC_XDR,
                body,
            };
            return self.send(message).map_err(Error::from);
        }
        match self.request(Request::Notify(request)) {
            Reply::Done => Ok(()),
            other => Err(Error::from_reply("asking for notification", other)),
        }
    }

    /// Registers this task as resource manager. If a resource manager that serves all requests is
    /// known, it is asked and may refuse; otherwise the daemon accepts any task. Returns PVM's
    /// values: the previous resource manager's tid (NONE if there was none) and the master's host
    /// entry.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn register_rm(&self, serves: RmServices) -> Result<(Tid, Option<HostEntry>), Error> {
        let what = "registering a resource manager";
        if let RmOutcome::Answer(body) =
            self.call_rm(|serves| serves.others, SM_SCHED, Bytes::new)?
        {
            let (previous, master) = unpack_sched(body).map_err(|e| rm_error(what, e))?;
            return Ok((previous, Some(master)));
        }
        let previous = match self.request(Request::RegisterRm(serves)) {
            Reply::Rm { previous } => previous,
            other => return Err(Error::from_reply(what, other)),
        };
        match self.request(Request::Config) {
            Reply::Hosts(table) => Ok((previous, table.get(HostId::MASTER).cloned())),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Returns the resource manager if it serves this kind of request and is another task.
    fn rm_serving(&self, serves: impl Fn(RmServices) -> bool) -> Option<RmInfo> {
        self.rm()
            .filter(|rm| serves(rm.serves) && rm.tid != self.tid())
    }

    /// Starts tasks with a placement lease, if there is one and the daemons still accept it.
    fn spawn_leased(&self, request: &SpawnRequest) -> Option<Vec<Result<Tid, PvmError>>> {
        let grant = self.with_core_mut(|core, now| core.placement_leases.take(now, request))??;
        match self.request(Request::SpawnLeased {
            request: request.clone(),
            lease: grant,
        }) {
            Reply::Spawned(results) if results.len() == request.count as usize => Some(results),
            _ => None,
        }
    }

    /// Prepares a request to the resource manager, if there is one for it.
    fn rm_call_target(&self, serves: impl Fn(RmServices) -> bool) -> Option<RmCallTarget> {
        // Read first, so that a death between the two reads is detected.
        let deaths = self.with_core(|core| core.rm_deaths());
        let rm = self.rm_serving(serves)?.tid;
        Some(RmCallTarget {
            rm,
            wid: self.next_wid(),
            deaths_before: deaths,
        })
    }

    fn call_rm(
        &self,
        serves: impl Fn(RmServices) -> bool,
        tag: i32,
        pack: impl FnOnce() -> Bytes,
    ) -> Result<RmOutcome, Error> {
        self.rm_call_target(serves)
            .map_or(Ok(RmOutcome::UseDaemon), |whom| {
                self.call_rm_target(&whom, tag, pack())
            })
    }

    /// Sends one request to the resource manager and waits for the answer with the same tag.
    fn call_rm_target(
        &self,
        target: &RmCallTarget,
        tag: i32,
        body: Bytes,
    ) -> Result<RmOutcome, Error> {
        let RmCallTarget {
            rm,
            wid,
            deaths_before,
        } = *target;
        let message = Message {
            src: self.tid(),
            dst: rm,
            ctx: CTX_BASE,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        };
        let _open = self.begin_rm_call(rm, tag, wid);
        self.send(message)?;
        let mut check = |core: &mut Core| {
            if let Some(body) = core.rm_calls.take_answer(wid) {
                return Some(RmOutcome::Answer(body));
            }
            if Some(core.rm_deaths()) == deaths_before && !core.is_gone(rm) {
                return None;
            }
            Some(
                core.rm_calls
                    .waiting_since(wid)
                    .map_or(RmOutcome::UseDaemon, |since| RmOutcome::RetryNext {
                        dead: rm,
                        since,
                    }),
            )
        };
        match self.core_wait(None, &mut check) {
            Ok(Some(asked)) => Ok(asked),
            Ok(None) => Ok(RmOutcome::UseDaemon),
            Err(e) => Err(Error::new(e, self.lost_reason())),
        }
    }

    /// Waits for a new resource manager, at most [`NEXT_RM_TIMEOUT`].
    fn wait_for_next_rm(&self, dead: Tid) {
        let mut check = |core: &mut Core| core.rm().filter(|rm| rm.tid != dead).map(drop);
        // Without a resource manager or a daemon the next request fails with the reason.
        let _ = self.core_wait(Some(Instant::now() + NEXT_RM_TIMEOUT), &mut check);
    }
}

fn rm_error(what: &str, code: PvmError) -> Error {
    Error::new(code, format!("{what}: the resource manager replied {code}"))
}

fn pack_names(names: &[String]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.strs(names);
    out.finish()
}

fn pack_notify(request: &NotifyRequest) -> Bytes {
    let (what, count, tids): (i32, i32, &[Tid]) = match &request.subjects {
        NotifySubjects::TaskExit(tids) => (NOTIFY_TASK_EXIT, tids.len() as i32, tids),
        NotifySubjects::HostDelete(tids) => (NOTIFY_HOST_DELETE, tids.len() as i32, tids),
        NotifySubjects::HostAdd { count } => (NOTIFY_HOST_ADD, *count, &[]),
    };
    let what = if request.cancel {
        what + NOTIFY_CANCEL
    } else {
        what
    };
    let mut out = Packer::new(Encoding::Xdr);
    out.int(what)
        .int(request.ctx)
        .int(request.tag)
        .int(count)
        .items(tids.iter().map(|tid| tid.raw()));
    out.finish()
}

/// Reads a count. A negative value is an error code.
fn unpack_count(from: &mut Unpacker) -> PvmResult<usize> {
    let count = from.int()?;
    usize::try_from(count).map_err(|_| PvmError::from_code(count).unwrap_or(PvmError::BadMsg))
}

/// Reads a host in the format of `SM_CONFIG` and `SM_ADDHOST`. An error code may take the place of
/// the first word.
fn unpack_host(from: &mut Unpacker) -> PvmResult<Result<HostEntry, PvmError>> {
    let raw = from.int()?;
    let (name, arch, speed, dsig) = (from.string()?, from.string()?, from.int()?, from.int()?);
    let tid = Tid::from_raw(raw);
    Ok(match tid.birth_host() {
        Some(id) if raw > 0 && tid == id.tid() => Ok(HostEntry {
            id,
            name,
            arch,
            speed,
            dsig,
            addresses: Vec::new(),
        }),
        _ => Err(PvmError::from_code(raw).unwrap_or(PvmError::BadMsg)),
    })
}

fn unpack_config(body: Bytes) -> PvmResult<HostTable> {
    let mut from = Unpacker::xdr(body);
    let count = unpack_count(&mut from)?;
    let _formats = from.int()?;
    let mut hosts = Vec::new();
    for _ in 0..count {
        hosts.push(unpack_host(&mut from)??);
    }
    Ok(HostTable {
        epoch: Epoch(0),
        hosts,
    })
}

fn unpack_sched(body: Bytes) -> PvmResult<(Tid, HostEntry)> {
    let mut from = Unpacker::xdr(body);
    let previous = from.int()?;
    if previous < 0 {
        return Err(PvmError::from_code(previous).unwrap_or(PvmError::Denied));
    }
    Ok((Tid::from_raw(previous), unpack_host(&mut from)??))
}

fn unpack_added(body: Bytes) -> PvmResult<Vec<AddedHost>> {
    let mut from = Unpacker::xdr(body);
    let count = unpack_count(&mut from)?;
    let _formats = from.int()?;
    let mut added = Vec::new();
    for _ in 0..count {
        let result = unpack_host(&mut from)?;
        let reason = result.as_ref().err().map_or_else(String::new, |e| {
            format!("the resource manager reports: {e}")
        });
        added.push(AddedHost { result, reason });
    }
    Ok(added)
}

fn unpack_deleted(body: Bytes) -> PvmResult<Vec<Result<(), PvmError>>> {
    let mut from = Unpacker::xdr(body);
    let count = unpack_count(&mut from)?;
    let mut results = Vec::new();
    for _ in 0..count {
        let status = from.int()?;
        let error = || PvmError::from_code(status).unwrap_or(PvmError::BadMsg);
        results.push(if status < 0 { Err(error()) } else { Ok(()) });
    }
    Ok(results)
}

fn unpack_tasks(body: Bytes) -> PvmResult<Vec<TaskInfo>> {
    let mut from = Unpacker::xdr(body);
    let code = from.int()?;
    if code < 0 {
        return Err(PvmError::from_code(code).unwrap_or(PvmError::BadMsg));
    }
    let mut tasks = Vec::new();
    while from.remaining() > 0 {
        let (tid, parent) = (Tid::from_raw(from.int()?), Tid::from_raw(from.int()?));
        let host = Tid::from_raw(from.int()?)
            .birth_host()
            .ok_or(PvmError::BadMsg)?;
        let (flags, name, pid) = (from.int()?, from.string()?, from.int()?);
        // The message does not name the user; a virtual machine belongs to one user.
        let uid = nix::unistd::geteuid().as_raw();
        tasks.push(TaskInfo {
            tid,
            parent,
            host,
            flags,
            name,
            pid,
            uid,
            migrating: false,
            paused: false,
            suspended: false,
        });
    }
    Ok(tasks)
}
