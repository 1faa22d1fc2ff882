//! Requests to the daemon that need no more than an answer: tasks, hosts, contexts, mailbox.

use crate::data::{pvmctrc, pvmmyctx, pvmrescode};
use crate::session;
use crate::{control, env, output, process, receive};
use libpvm::Runtime;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{CTX_BASE, ENC_XDR};
use sempa_proto::place::Place;
use sempa_proto::table::{AddedHost, HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    MailboxClass, MailboxRequest, NotifyRequest, NotifyWhat, Reply, Request, RmServes, SPAWN_ARCH,
    SPAWN_HOST, Service, Sink, SpawnRequest, TracerSettings,
};
use sempa_proto::{Message, PvmError, PvmResult, Tid};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Tasks that one call may ask for; a daemon refuses more.
const SPAWN_COUNT_MAX: u32 = 65_536;
/// Hosts that one call may add or delete.
pub(crate) const HOSTS_PER_CALL_MAX: usize = 4095;
/// `PvmNotifyCancel`.
const NOTIFY_CANCEL: i32 = 256;
/// `PvmMboxPersistent`.
const MBOX_PERSISTENT: i32 = 1;
/// `PvmMboxMultiInstance`.
pub(crate) const MBOX_MULTI: i32 = 2;
/// `PvmMboxFirstAvail`.
const MBOX_FIRST: i32 = 8;
/// Where a direct index stands in mailbox flags.
const MBOX_INDEX_SHIFT: u32 = 10;
/// Indices below this can be asked for directly.
const MBOX_INDEX_MAX: i32 = 1 << 21;
/// How long a halted daemon is waited for.
const HALT_MAX: Duration = Duration::from_secs(10);
/// How often its place is looked at meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A request that is only done or not.
fn done(reply: Reply) -> PvmResult<()> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(failure(&other)),
    }
}

/// The code of a reply that is not what was asked for.
fn failure(reply: &Reply) -> PvmError {
    match reply {
        Reply::Failed { error, .. } => *error,
        _ => PvmError::BadMsg,
    }
}

fn task_tid(tid: i32) -> PvmResult<Tid> {
    Some(Tid::from_raw(tid))
        .filter(|tid| tid.is_task())
        .ok_or(PvmError::BadParam)
}

/// Starts tasks; answers one result for each, the started ones first.
///
/// # Errors
/// When nothing was tried.
pub(crate) fn spawn(
    file: String,
    args: Vec<Vec<u8>>,
    flags: i32,
    place: String,
    count: i32,
) -> PvmResult<Vec<PvmResult<Tid>>> {
    let rt = session::runtime()?;
    // The code alone would not say what is wrong with the file.
    libpvm::job::of_process().map_err(|error| {
        session::say(&format!("{}\n", error.reason), false);
        error.code
    })?;
    let count = u32::try_from(count)
        .ok()
        .filter(|n| *n > 0)
        .ok_or(PvmError::BadParam)?;
    if count > SPAWN_COUNT_MAX {
        return Err(PvmError::OutOfRes);
    }
    let flags = flags | env::get("PVMTASK").map_or(0, |text| env::number(text.as_bytes()));
    if flags & (SPAWN_HOST | SPAWN_ARCH) != 0 && place.is_empty() {
        return Ok(vec![Err(PvmError::NoHost); count as usize]);
    }
    // A negative tid means that nobody gets it.
    let sink = |tid: i32, ctx, tag| Sink {
        tid: Tid::from_raw(tid.max(0)),
        ctx,
        tag,
    };
    let output = sink(
        pvmctrc.out_tid.load(Relaxed),
        pvmctrc.out_ctx.load(Relaxed),
        pvmctrc.out_tag.load(Relaxed),
    );
    let trace = sink(
        pvmctrc.trace_tid.load(Relaxed),
        pvmctrc.trace_ctx.load(Relaxed),
        pvmctrc.trace_tag.load(Relaxed),
    );
    let request = SpawnRequest {
        file,
        args,
        flags,
        place,
        count,
        env: env::for_children(),
        output,
        trace,
    };
    let mut results = rt.spawn(request).map_err(|error| error.code)?;
    // A stable sort: the tids keep their order, the errors go behind them.
    results.sort_by_key(Result::is_err);
    let started: Vec<Tid> = results.iter().copied().flatten().collect();
    if output::catches_children() {
        session::lock().catch.expect(&started);
    }
    control::tell_siblings(&rt, &started);
    Ok(results)
}

/// The tasks of the spawn this one belongs to; waits until they are known. A task that was not spawned is alone.
///
/// # Errors
/// `SysErr` when the daemon is gone.
pub(crate) fn siblings() -> PvmResult<Vec<Tid>> {
    let rt = session::runtime()?;
    if rt.parent() == Tid::NONE {
        return Ok(vec![rt.tid()]);
    }
    receive::wait_for(&rt, |session| session.siblings.clone())
}

/// The host table.
///
/// # Errors
/// As the daemon or the resource manager says.
pub(crate) fn config() -> PvmResult<HostTable> {
    session::runtime()?.config().map_err(|error| error.code)
}

/// Data signature of the first host with this architecture.
///
/// # Errors
/// `NotFound` when there is none.
pub(crate) fn arch_code(arch: &str) -> PvmResult<i32> {
    let table = config()?;
    table
        .hosts
        .iter()
        .find(|host| host.arch == arch)
        .map(|host| host.dsig)
        .ok_or(PvmError::NotFound)
}

/// Tasks of all hosts (0), one host, or one task.
///
/// # Errors
/// `NoHost` for an unknown host.
pub(crate) fn tasks(selector: i32) -> PvmResult<Vec<TaskInfo>> {
    session::runtime()?
        .tasks(Tid::from_raw(selector))
        .map_err(|error| error.code)
}

fn lines(names: Vec<Vec<u8>>) -> Vec<String> {
    names
        .into_iter()
        .map(|name| String::from_utf8_lossy(&name).into_owned())
        .collect()
}

/// Adds hosts, one host-file line each.
///
/// # Errors
/// When nothing was tried.
pub(crate) fn add_hosts(names: Vec<Vec<u8>>) -> PvmResult<Vec<AddedHost>> {
    let rt = session::runtime()?;
    rt.add_hosts(lines(names)).map_err(|error| error.code)
}

/// Removes hosts by name.
///
/// # Errors
/// When nothing was tried.
pub(crate) fn delete_hosts(names: Vec<Vec<u8>>) -> PvmResult<Vec<PvmResult<()>>> {
    let rt = session::runtime()?;
    rt.delete_hosts(lines(names)).map_err(|error| error.code)
}

/// Is the host up?
///
/// # Errors
/// `NoHost`, `HostFail`; `BadParam` for an empty name.
pub(crate) fn host_status(name: String) -> PvmResult<()> {
    let rt = session::runtime()?;
    if name.is_empty() {
        return Err(PvmError::BadParam);
    }
    done(rt.request(Request::HostStatus { name }))
}

/// Is the task there?
///
/// # Errors
/// `NoTask`; `BadParam` for what cannot be a task.
pub(crate) fn task_status(tid: i32) -> PvmResult<()> {
    let rt = session::runtime()?;
    done(rt.request(Request::TaskStatus {
        tid: task_tid(tid)?,
    }))
}

/// Sends a signal; no error when the task has ended already.
///
/// # Errors
/// `BadParam` for what cannot be a task.
pub(crate) fn signal(tid: i32, signal: i32) -> PvmResult<()> {
    let rt = session::runtime()?;
    match done(rt.request(Request::Signal {
        tid: task_tid(tid)?,
        signal,
    })) {
        Err(PvmError::NoTask) => Ok(()),
        other => other,
    }
}

/// Time of day of a host, in microseconds since 1970.
///
/// # Errors
/// `NoHost`, `HostFail`.
pub(crate) fn host_clock(host: i32) -> PvmResult<u64> {
    let rt = session::runtime()?;
    match rt.request(Request::HostSync {
        host: Tid::from_raw(host),
    }) {
        Reply::Clock(time) => Ok(time.0),
        other => Err(failure(&other)),
    }
}

/// Stops the virtual machine. A program from the command line waits until the daemon here has given its place back, so
/// that it may start another one; for a spawned task the daemon waits.
///
/// # Errors
/// As the daemon says; that its connection breaks is what halting is.
pub(crate) fn halt() -> PvmResult<()> {
    let rt = session::runtime()?;
    let place = Place::of(process::user() as u32, env::get)
        .ok()
        .filter(|_| rt.parent() == Tid::NONE);
    // The lock holds the number of the daemon's process, and is the last that it removes.
    let holder = || fs::read_to_string(place.as_ref()?.lock()).ok();
    let before = holder();
    match done(rt.request(Request::Halt)) {
        Ok(()) | Err(PvmError::SysErr) => {}
        other => return other,
    }
    let deadline = Instant::now() + HALT_MAX;
    while before.is_some() && holder() == before && Instant::now() < deadline {
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// A context that nobody else has.
///
/// # Errors
/// `OutOfRes` when there is none left.
pub(crate) fn new_context() -> PvmResult<i32> {
    match session::runtime()?.request(Request::NewContext) {
        Reply::Context(ctx) => Ok(ctx),
        other => Err(failure(&other)),
    }
}

/// Gives a context back.
///
/// # Errors
/// `NotFound` when it is not this task's.
pub(crate) fn free_context(ctx: i32) -> PvmResult<()> {
    done(session::runtime()?.request(Request::FreeContext { ctx }))
}

/// Where this task's own output goes from now on.
///
/// # Errors
/// As the daemon says.
pub(crate) fn set_output(sink: Sink) -> PvmResult<()> {
    done(session::runtime()?.request(Request::SetOutput(sink)))
}

/// Where this task's own trace records go from now on.
///
/// # Errors
/// As the daemon says.
pub(crate) fn set_trace(sink: Sink) -> PvmResult<()> {
    done(session::runtime()?.request(Request::SetTrace(sink)))
}

/// Removes mailbox entries that nobody owns: all, those of a name, or that at an index of it. With `kill` tasks are ended,
/// and all such entries go.
///
/// # Errors
/// As the daemon says.
pub(crate) fn reset(kill: bool, name: String, index: Option<i32>) -> PvmResult<()> {
    let what = if kill {
        Request::Reset { kill }
    } else {
        Request::Mailbox(MailboxRequest::Clean { name, index })
    };
    done(session::runtime()?.request(what))
}

/// Asks for messages about an event. `vals` are tids; for added hosts `count` says how many messages.
///
/// # Errors
/// `BadParam` for an unknown kind, no tids, or tids that are not tasks.
pub(crate) fn notify(what: i32, tag: i32, count: i32, vals: &[i32]) -> PvmResult<()> {
    let rt = session::runtime()?;
    let cancel = what & NOTIFY_CANCEL != 0;
    let ctx = pvmmyctx.load(Relaxed);
    if tag < 0 && pvmrescode.load(Relaxed) == 0 {
        return Err(PvmError::BadParam);
    }
    let tids: Vec<Tid> = vals.iter().map(|tid| Tid::from_raw(*tid)).collect();
    let ask = |what| {
        rt.notify(NotifyRequest {
            what,
            ctx,
            tag,
            cancel,
        })
        .map_err(|error| error.code)
    };
    match what & !NOTIFY_CANCEL {
        1 if count < 1 || !tids.iter().all(|tid| tid.is_task()) => Err(PvmError::BadParam),
        1 => {
            let (own, others): (Vec<Tid>, Vec<Tid>) =
                tids.into_iter().partition(|tid| *tid == rt.tid());
            own_exit(own.len(), ctx, tag, cancel, &rt);
            if others.is_empty() {
                Ok(())
            } else {
                ask(NotifyWhat::TaskExit(others))
            }
        }
        2 if count < 1 => Err(PvmError::BadParam),
        2 => ask(NotifyWhat::HostDelete(tids)),
        3 => ask(NotifyWhat::HostAdd { count }),
        4 => rt.tell_of_routes(ctx, tag, if cancel { 0 } else { count }),
        5 if count < 1 => Err(PvmError::BadParam),
        5 => tids
            .iter()
            .try_for_each(|tid| rt.tell_of_route_end(*tid, ctx, tag, cancel)),
        _ => Err(PvmError::BadParam),
    }
}

/// The own end is told by this library, not by the daemon; a cancelled request is answered at once.
fn own_exit(times: usize, ctx: i32, tag: i32, cancel: bool, rt: &Runtime) {
    for _ in 0..times {
        let mut session = session::lock();
        if !cancel {
            session.own_exit.push((ctx, tag));
        } else if let Some(place) = session
            .own_exit
            .iter()
            .position(|asked| *asked == (ctx, tag))
        {
            session.own_exit.remove(place);
            drop(session);
            tell_own_exit(rt, ctx, tag);
        }
    }
}

/// Tells this task of its own end, in the daemon's name.
pub(crate) fn tell_own_exit(rt: &Runtime, ctx: i32, tag: i32) {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(rt.tid().raw());
    let (src, dst) = (Tid::MY_DAEMON, rt.tid());
    receive::arrive(
        rt,
        Message {
            src,
            dst,
            ctx,
            tag,
            wid: 0,
            enc: ENC_XDR,
            body: body.finish(),
        },
    );
}

/// A name in the mailbox.
fn class(name: String) -> PvmResult<String> {
    if name.is_empty() {
        Err(PvmError::BadParam)
    } else {
        Ok(name)
    }
}

/// Stores a message under a name; answers its index.
///
/// # Errors
/// `Denied`, `Exists`; `BadParam` for an empty name.
pub(crate) fn put(name: String, message: Message, flags: i32) -> PvmResult<i32> {
    let rt = session::runtime()?;
    let name = class(name)?;
    match rt.request(Request::Mailbox(MailboxRequest::Put {
        name,
        flags,
        message,
    })) {
        Reply::MailboxIndex(index) => Ok(index),
        other => Err(failure(&other)),
    }
}

/// Fetches a message.
///
/// # Errors
/// `NotFound`, `Denied`; `BadParam` for an empty name or a negative index.
pub(crate) fn take(name: String, index: i32, flags: i32) -> PvmResult<Message> {
    let rt = session::runtime()?;
    let name = class(name)?;
    if index < 0 {
        return Err(PvmError::BadParam);
    }
    match rt.request(Request::Mailbox(MailboxRequest::Take {
        name,
        index,
        flags,
    })) {
        Reply::Mailbox(message) => Ok(message),
        other => Err(failure(&other)),
    }
}

/// Removes an entry.
///
/// # Errors
/// As [`take`].
pub(crate) fn delete(name: String, index: i32) -> PvmResult<()> {
    let rt = session::runtime()?;
    let name = class(name)?;
    if index < 0 {
        return Err(PvmError::BadParam);
    }
    done(rt.request(Request::Mailbox(MailboxRequest::Delete { name, index })))
}

/// Classes whose names match; all for an empty pattern.
///
/// # Errors
/// As the daemon says.
pub(crate) fn list(pattern: String) -> PvmResult<Vec<MailboxClass>> {
    let rt = session::runtime()?;
    match rt.request(Request::Mailbox(MailboxRequest::List { pattern })) {
        Reply::MailboxClasses(classes) => Ok(classes),
        other => Err(failure(&other)),
    }
}

/// A message of one int, as the old mailbox calls and registrations store it.
fn int_message(rt: &Runtime, value: i32) -> Message {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(value);
    let me = rt.tid();
    Message {
        src: me,
        dst: me,
        ctx: CTX_BASE,
        tag: 0,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    }
}

/// Stores one int (`pvm_insert`): at a free index for −1, else at that index if it is free.
///
/// # Errors
/// `Denied` when the index is taken.
pub(crate) fn insert(name: String, index: i32, value: i32) -> PvmResult<i32> {
    let rt = session::runtime()?;
    let message = int_message(&rt, value);
    if index == -1 {
        return put(name, message, MBOX_PERSISTENT | MBOX_MULTI);
    }
    if !(0..MBOX_INDEX_MAX).contains(&index) {
        return Err(PvmError::BadParam);
    }
    let classes = list(name.clone())?;
    let taken = classes
        .iter()
        .any(|c| c.name == name && c.entries.iter().any(|(at, _, _)| *at == index));
    if taken {
        Err(PvmError::Denied)
    } else {
        put(name, message, MBOX_PERSISTENT | index << MBOX_INDEX_SHIFT)
    }
}

/// Reads one int (`pvm_lookup`): the first entry for −1.
///
/// # Errors
/// `NotFound`; `BadMsg` when the entry is not an int.
pub(crate) fn lookup(name: String, index: i32) -> PvmResult<i32> {
    let (index, flags) = if index == -1 {
        (0, MBOX_FIRST)
    } else {
        (index, 0)
    };
    let message = take(name, index, flags)?;
    libpvm::Vm::unpack(&message)
        .and_then(|mut body| Ok(body.int()?))
        .map_err(|_| PvmError::BadMsg)
}

/// Puts this task's id into a well-known class; answers the index.
///
/// # Errors
/// As [`put`].
pub(crate) fn put_own_tid(name: &str) -> PvmResult<i32> {
    let rt = session::runtime()?;
    put(
        name.to_string(),
        int_message(&rt, rt.tid().raw()),
        MBOX_MULTI,
    )
}

/// Tasks that a reset spares.
///
/// # Errors
/// As the daemon says.
pub(crate) fn no_resets() -> PvmResult<Vec<i32>> {
    let classes = list(sempa_proto::sm::NO_RESET_CLASS.to_string())?;
    let entries = classes
        .into_iter()
        .filter(|c| c.name == sempa_proto::sm::NO_RESET_CLASS);
    let mut tids = Vec::new();
    for (index, _, _) in entries.flat_map(|c| c.entries) {
        match lookup(sempa_proto::sm::NO_RESET_CLASS.to_string(), index) {
            Ok(tid) => tids.push(tid),
            // It ended between the two requests.
            Err(PvmError::NotFound) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(tids)
}

/// Asks the daemon about its inside.
///
/// # Errors
/// `BadParam` for none or too many numbers.
pub(crate) fn tickle(words: Vec<i32>) -> PvmResult<Vec<i32>> {
    match session::runtime()?.request(Request::Tickle(words)) {
        Reply::Numbers(numbers) => Ok(numbers),
        other => Err(failure(&other)),
    }
}

/// Becomes the resource manager; answers the former one's tid (0 without) and the master's entry.
///
/// # Errors
/// `Already` or `Denied` when somebody else is.
pub(crate) fn register_rm() -> PvmResult<(i32, Option<HostEntry>)> {
    let rt = session::runtime()?;
    let (previous, master) = rt
        .register_rm(RmServes {
            spawn: true,
            others: true,
            ends: true,
        })
        .map_err(|error| error.code)?;
    put_own_tid(sempa_proto::sm::RM_CLASS)?;
    Ok((previous.raw(), master))
}

/// Begins or ends to serve the daemon; the well-known class of the mailbox says who does.
///
/// # Errors
/// `Already` when somebody else serves, `HosterNotMaster` for a hoster elsewhere than with the master.
pub(crate) fn serve(service: Service) -> PvmResult<()> {
    let rt = session::runtime()?;
    let class = match service {
        Service::Hoster => sempa_proto::sm::HOSTER_CLASS,
        Service::Tasker => sempa_proto::sm::TASKER_CLASS,
    };
    let message = int_message(&rt, rt.tid().raw());
    serving(
        &rt,
        rt.request(Request::Serve(service)),
        class,
        message,
        MBOX_MULTI,
    )
}

/// Begins or ends to be the tracer.
///
/// # Errors
/// `Already` when somebody else is.
pub(crate) fn serve_tracer(settings: TracerSettings) -> PvmResult<()> {
    let rt = session::runtime()?;
    let TracerSettings {
        trace_ctx,
        trace_tag,
        out_ctx,
        out_tag,
        mask,
        buffer,
        options,
    } = &settings;
    let mut body = Packer::new(Encoding::Xdr);
    body.items([rt.tid().raw(), *trace_ctx, *trace_tag, *out_ctx, *out_tag]);
    body.str(mask).items([*buffer, *options]);
    let me = rt.tid();
    let message = Message {
        src: me,
        dst: me,
        ctx: CTX_BASE,
        tag: 0,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    };
    let reply = rt.request(Request::ServeTracer(settings));
    serving(&rt, reply, sempa_proto::sm::TRACER_CLASS, message, 0)
}

fn serving(rt: &Runtime, reply: Reply, class: &str, message: Message, flags: i32) -> PvmResult<()> {
    match reply {
        Reply::Serving(true) => put(class.to_string(), message, flags).map(drop),
        Reply::Serving(false) => {
            let entries = list(class.to_string())?
                .into_iter()
                .filter(|c| c.name == class)
                .flat_map(|c| c.entries);
            for (index, owner, _) in entries {
                if owner == rt.tid() {
                    delete(class.to_string(), index)?;
                }
            }
            Ok(())
        }
        other => Err(failure(&other)),
    }
}
