//! Requests that a resource manager may serve in the daemon's place (`SM_*`), with the way back to the daemon when it dies.

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
    NotifyRequest, NotifyWhat, Reply, Request, RmInfo, RmServes, SpawnRequest,
};
use sempa_proto::{Epoch, HostId, Micros, PvmError, PvmResult, Tid};
use std::time::{Duration, Instant};

/// `PvmTaskExit`.
pub const NOTIFY_TASK_EXIT: i32 = 1;
/// `PvmHostDelete`.
pub const NOTIFY_HOST_DELETE: i32 = 2;
/// `PvmHostAdd`.
pub const NOTIFY_HOST_ADD: i32 = 3;
/// `PvmNotifyCancel`, added to one of the others.
pub const NOTIFY_CANCEL: i32 = 256;

/// What became of a question to the resource manager.
enum Asked {
    /// Its answer.
    Answer(Bytes),
    /// None serves this, or it died before it answered: ask the daemon.
    AskDaemon,
    /// It died while the request waited since then, and nothing of it was begun: ask the next one.
    AskNext { dead: Tid, since: Micros },
}

/// A resource manager that is to be asked something.
struct Whom {
    rm: Tid,
    /// The question's wait id.
    wid: i32,
    /// Resource managers that had died by then; `None` in a forked child.
    deaths: Option<u64>,
}

/// How long a request that waits for a place waits for another resource manager when its own has died. The master starts one
/// at once; when nobody has come by then, nobody will.
const NEXT_RM_TIME: Duration = Duration::from_secs(10);

impl Runtime {
    /// Starts tasks, placed by the resource manager when there is one, otherwise by the daemon. One that has said beforehand
    /// where the next tasks of such requests go is not asked ([`sempa_proto::sm::Grant`]).
    ///
    /// When the resource manager dies before it answers, the daemon is asked; tasks that it had started by then live on. A
    /// request that it let wait goes on waiting under the next resource manager, if there is one within ten seconds.
    ///
    /// What the job file in the environment says ([`crate::job`]) is filled in.
    ///
    /// # Errors
    /// When nothing was tried. Single tasks fail in their own result.
    pub fn spawn(&self, mut request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        crate::job::fill(crate::job::of_process(), &mut request)?;
        let Some(mut results) = self.spawn_granted(&request) else {
            return self.spawn_asked(request);
        };
        // Whoever is asked for the rest says what is wrong.
        request.count = results.iter().filter(|result| result.is_err()).count() as u32;
        if request.count > 0
            && let Ok(rest) = self.spawn_asked(request)
        {
            results
                .iter_mut()
                .filter(|result| result.is_err())
                .zip(rest)
                .for_each(|(result, other)| *result = other);
        }
        Ok(results)
    }

    /// Starts tasks for which nobody has said beforehand where they go.
    fn spawn_asked(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let what = "spawning tasks";
        let mut waits = None;
        while let Some(whom) = self.whom_to_ask(|serves| serves.spawn) {
            self.timed(|core, now| core.grants.asks(now, whom.rm, whom.wid, &request));
            match self.ask_whom(&whom, SM_SPAWN, pack_spawn(&request, waits))? {
                Asked::Answer(body) => {
                    let results = unpack_tids(body).map_err(|e| rm_error(what, e))?;
                    if results.len() != request.count as usize {
                        return Err(rm_error(what, PvmError::Mismatch));
                    }
                    return Ok(results);
                }
                Asked::AskNext { dead, since } => {
                    waits = Some(since);
                    self.wait_for_next_rm(dead);
                }
                Asked::AskDaemon => break,
            }
        }
        match self.request(Request::Spawn(request)) {
            Reply::Spawned(results) => Ok(results),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// The host table. From a resource manager it comes without addresses and epoch.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn config(&self) -> Result<HostTable, Error> {
        let what = "reading the host table";
        if let Asked::Answer(body) = self.ask_rm(|serves| serves.others, SM_CONFIG, Bytes::new)? {
            return unpack_config(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::Config) {
            Reply::Hosts(table) => Ok(table),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// The tasks that `selector` names: all ([`Tid::NONE`]), those of one host, or one.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let what = "listing tasks";
        let pack = || {
            let mut out = Packer::new(Encoding::Xdr);
            out.int(selector.raw());
            out.finish()
        };
        if let Asked::Answer(body) = self.ask_rm(|serves| serves.others, SM_TASK, pack)? {
            return unpack_tasks(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::Tasks { selector }) {
            Reply::Tasks(tasks) => Ok(tasks),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Adds hosts, one host-file line each; one result per line.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn add_hosts(&self, lines: Vec<String>) -> Result<Vec<AddedHost>, Error> {
        let what = "adding hosts";
        if let Asked::Answer(body) =
            self.ask_rm(|serves| serves.others, SM_ADDHOST, || pack_names(&lines))?
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

    /// Removes hosts by name; one result per name.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn delete_hosts(&self, names: Vec<String>) -> Result<Vec<Result<(), PvmError>>, Error> {
        let what = "deleting hosts";
        if let Asked::Answer(body) =
            self.ask_rm(|serves| serves.others, SM_DELHOST, || pack_names(&names))?
        {
            return unpack_deleted(body).map_err(|e| rm_error(what, e));
        }
        match self.request(Request::DelHosts { names }) {
            Reply::HostsDeleted(results) => Ok(results),
            other => Err(Error::from_reply(what, other)),
        }
    }

    /// Asks for messages about the end of tasks or the coming and going of hosts. A resource manager does not confirm it.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn notify(&self, request: NotifyRequest) -> Result<(), Error> {
        if let Some(rm) = self.rm_for(|serves| serves.others) {
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

    /// Becomes the resource manager. When this task was told of one that serves everything, that one is asked and may
    /// refuse; otherwise the daemon takes whoever comes. Answers what PVM does: the former one's tid, NONE without; and the
    /// master's entry.
    ///
    /// # Errors
    /// As the resource manager or the daemon says.
    pub fn register_rm(&self, serves: RmServes) -> Result<(Tid, Option<HostEntry>), Error> {
        let what = "registering a resource manager";
        if let Asked::Answer(body) = self.ask_rm(|serves| serves.others, SM_SCHED, Bytes::new)? {
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

    /// The resource manager, when it serves this and is not this task itself.
    fn rm_for(&self, serves: impl Fn(RmServes) -> bool) -> Option<RmInfo> {
        self.rm()
            .filter(|rm| serves(rm.serves) && rm.tid != self.tid())
    }

    /// Starts tasks where the resource manager has said beforehand, if it has and its word still holds.
    fn spawn_granted(&self, request: &SpawnRequest) -> Option<Vec<Result<Tid, PvmError>>> {
        let grant = self.timed(|core, now| core.grants.take(now, request))??;
        match self.request(Request::SpawnGranted {
            request: request.clone(),
            grant,
        }) {
            Reply::Spawned(results) if results.len() == request.count as usize => Some(results),
            _ => None,
        }
    }

    /// The resource manager for a question, when there is one for it.
    fn whom_to_ask(&self, serves: impl Fn(RmServes) -> bool) -> Option<Whom> {
        // Taken first: a death between the two looks is then seen as one.
        let deaths = self.look(|core| core.rm_deaths());
        let rm = self.rm_for(serves)?.tid;
        Some(Whom {
            rm,
            wid: self.next_wid(),
            deaths,
        })
    }

    fn ask_rm(
        &self,
        serves: impl Fn(RmServes) -> bool,
        tag: i32,
        pack: impl FnOnce() -> Bytes,
    ) -> Result<Asked, Error> {
        self.whom_to_ask(serves)
            .map_or(Ok(Asked::AskDaemon), |whom| {
                self.ask_whom(&whom, tag, pack())
            })
    }

    /// Sends one request to the resource manager and waits for the answer with the same tag.
    fn ask_whom(&self, whom: &Whom, tag: i32, body: Bytes) -> Result<Asked, Error> {
        let Whom { rm, wid, deaths } = *whom;
        let message = Message {
            src: self.tid(),
            dst: rm,
            ctx: CTX_BASE,
            tag,
            wid,
            enc: ENC_XDR,
            body,
        };
        let _open = self.open_question(rm, tag, wid);
        self.send(message)?;
        let mut look = |core: &mut Core| {
            if let Some(body) = core.questions.take_answer(wid) {
                return Some(Asked::Answer(body));
            }
            if Some(core.rm_deaths()) == deaths && !core.is_gone(rm) {
                return None;
            }
            Some(
                core.questions
                    .waits_since(wid)
                    .map_or(Asked::AskDaemon, |since| Asked::AskNext { dead: rm, since }),
            )
        };
        match self.core_wait(None, &mut look) {
            Ok(Some(asked)) => Ok(asked),
            Ok(None) => Ok(Asked::AskDaemon),
            Err(e) => Err(Error::new(e, self.why_lost())),
        }
    }

    /// Waits until there is a resource manager again, but not for ever.
    fn wait_for_next_rm(&self, dead: Tid) {
        let mut look = |core: &mut Core| core.rm().filter(|rm| rm.tid != dead).map(drop);
        // Without one, and without a daemon, the next question says so.
        let _ = self.core_wait(Some(Instant::now() + NEXT_RM_TIME), &mut look);
    }
}

fn rm_error(what: &str, code: PvmError) -> Error {
    Error::new(
        code,
        format!("{what}: the resource manager's answer: {code}"),
    )
}

fn pack_names(names: &[String]) -> Bytes {
    let mut out = Packer::new(Encoding::Xdr);
    out.strs(names);
    out.finish()
}

fn pack_notify(request: &NotifyRequest) -> Bytes {
    let (what, count, tids): (i32, i32, &[Tid]) = match &request.what {
        NotifyWhat::TaskExit(tids) => (NOTIFY_TASK_EXIT, tids.len() as i32, tids),
        NotifyWhat::HostDelete(tids) => (NOTIFY_HOST_DELETE, tids.len() as i32, tids),
        NotifyWhat::HostAdd { count } => (NOTIFY_HOST_ADD, *count, &[]),
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

/// A count that may be an error code instead.
fn unpack_count(from: &mut Unpacker) -> PvmResult<usize> {
    let count = from.int()?;
    usize::try_from(count).map_err(|_| PvmError::from_code(count).unwrap_or(PvmError::BadMsg))
}

/// A host as `SM_CONFIG` and `SM_ADDHOST` describe it; the first word may be an error code instead.
fn unpack_host(from: &mut Unpacker) -> PvmResult<Result<HostEntry, PvmError>> {
    let raw = from.int()?;
    let (name, arch, speed, dsig) = (from.string()?, from.string()?, from.int()?, from.int()?);
    let tid = Tid::from_raw(raw);
    Ok(match tid.home() {
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
        let reason = result
            .as_ref()
            .err()
            .map_or_else(String::new, |e| format!("the resource manager says: {e}"));
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
        let host = Tid::from_raw(from.int()?).home().ok_or(PvmError::BadMsg)?;
        let (flags, name, pid) = (from.int()?, from.string()?, from.int()?);
        // The message does not say whose it is; a virtual machine belongs to one user.
        let uid = nix::unistd::geteuid().as_raw();
        tasks.push(TaskInfo {
            tid,
            parent,
            host,
            flags,
            name,
            pid,
            uid,
            moving: false,
            stopped: false,
            suspended: false,
        });
    }
    Ok(tasks)
}
