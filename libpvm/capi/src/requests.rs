//! Calls that consist of a request to the daemon and its reply: tasks, hosts, contexts, mailbox,
//! services.

use crate::data::{pvmctrc, pvmmyctx, pvmrescode};
use crate::session;
use crate::{control, env, output, process, receive};
use libpvm::Runtime;
use libpvm::runtime::{IntakeFn, runtime_paths};
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{CTX_BASE, ENC_XDR};
use sempa_proto::table::{AddedHost, HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    MailboxClass, MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, RmServices,
    SPAWN_ARCH, SPAWN_HOST, Service, Sink, SpawnRequest, TracerSettings,
};
use sempa_proto::{Message, PvmError, PvmResult, Tid};
use std::ops::Deref;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Maximum number of tasks of one spawn; a daemon refuses more.
const TASKS_PER_SPAWN_MAX: u32 = 65_536;
/// Maximum number of hosts that one call may add or remove.
pub(crate) const HOSTS_PER_CALL_MAX: usize = 4095;
const NOTIFY_CANCEL: i32 = 256;
const MBOX_PERSISTENT: i32 = 1;
pub(crate) const MBOX_MULTI_INSTANCE: i32 = 2;
/// Bit position of a direct index in mailbox flags (`PvmMboxDirectIndexShift`).
const MBOX_INDEX_SHIFT: u32 = 10;
/// Exclusive upper bound of direct mailbox indices (`PvmMboxMaxDirectIndex`).
const MBOX_INDEX_END: i32 = 1 << 21;
/// Maximum time for which [`halt`] waits until the local daemon has ended.
const HALT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two checks of the daemon's lock file.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns `Ok` for [`Reply::Done`], the expected reply to a request without a result; otherwise
/// the error of the reply.
fn expect_done(reply: Reply) -> PvmResult<()> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(reply_error(&other)),
    }
}

/// Returns the error code of [`Reply::Failed`]; `BadMsg` for any other reply, because its kind was
/// not expected.
fn reply_error(reply: &Reply) -> PvmError {
    match reply {
        Reply::Failed { error, .. } => *error,
        _ => PvmError::BadMsg,
    }
}

/// The connection to the daemon during a call that waits for a reply. When the call ends, the
/// messages that arrived before the reply are taken in, as in PVM.
///
/// A call that is refused sends no request and takes in no message, so it must check its arguments
/// before it creates this value.
struct RequestConnection(Runtime);

impl Deref for RequestConnection {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        &self.0
    }
}

impl Drop for RequestConnection {
    fn drop(&mut self) {
        receive::take_in_all(&self.0.with_intake(None));
    }
}

/// Returns the connection for a request. Enrols the process first if it is not a task. If taking in
/// messages may have an effect, messages are also taken in while the request waits for its reply.
///
/// # Errors
/// As [`session::runtime`].
fn request_connection() -> PvmResult<RequestConnection> {
    let rt = session::runtime()?;
    let takes_in = session::lock().has_intake_effects() && !receive::is_in_handler();
    let intake: Option<IntakeFn> = takes_in.then_some(receive::take_in_all);
    Ok(RequestConnection(rt.with_intake(intake)))
}

fn checked_task_tid(tid: i32) -> PvmResult<Tid> {
    Some(Tid::from_raw(tid))
        .filter(|tid| tid.is_task())
        .ok_or(PvmError::BadParam)
}

/// Starts tasks. Returns one result for each task; the tasks that were started come first.
///
/// # Errors
/// The whole request failed.
pub(crate) fn spawn(
    file: String,
    args: Vec<Vec<u8>>,
    flags: i32,
    selection: String,
    count: i32,
) -> PvmResult<Vec<PvmResult<Tid>>> {
    session::runtime()?;
    // The error code alone does not say what is wrong with the job file.
    libpvm::job::from_process_env().map_err(|error| {
        session::log_stderr(&format!("{}\n", error.reason), false);
        error.code
    })?;
    let count = u32::try_from(count)
        .ok()
        .filter(|n| *n > 0)
        .ok_or(PvmError::BadParam)?;
    if count > TASKS_PER_SPAWN_MAX {
        return Err(PvmError::OutOfRes);
    }
    let flags =
        flags | env::read_var("PVMTASK").map_or(0, |text| env::parse_number(text.as_bytes()));
    if flags & (SPAWN_HOST | SPAWN_ARCH) != 0 && selection.is_empty() {
        return Ok(vec![Err(PvmError::NoHost); count as usize]);
    }
    // The program sets a negative tid to suppress the messages. The daemon accepts only 0 for this
    // purpose.
    let make_sink = |tid: i32, ctx, tag| Sink {
        tid: Tid::from_raw(tid.max(0)),
        ctx,
        tag,
    };
    let output = make_sink(
        pvmctrc.out_tid.load(Relaxed),
        pvmctrc.out_ctx.load(Relaxed),
        pvmctrc.out_tag.load(Relaxed),
    );
    let trace = make_sink(
        pvmctrc.trace_tid.load(Relaxed),
        pvmctrc.trace_ctx.load(Relaxed),
        pvmctrc.trace_tag.load(Relaxed),
    );
    let request = SpawnRequest {
        program: file,
        args,
        flags,
        where_arg: selection,
        task_count: count,
        env: env::child_environment(),
        output_sink: output,
        trace_sink: trace,
        past: Default::default(),
    };
    let rt = request_connection()?;
    let mut results = rt.spawn(request).map_err(|error| error.code)?;
    // The sort is stable: the tids stay in order, and the errors follow the tids.
    results.sort_by_key(Result::is_err);
    let started_tids: Vec<Tid> = results.iter().copied().flatten().collect();
    if output::prints_child_output() {
        session::lock().output_catcher.register(&started_tids);
    }
    control::send_siblings(&rt, &started_tids);
    Ok(results)
}

/// Waits until the siblings are known, and returns the tids of all tasks of the spawn that started
/// this task. For a task that was not spawned, returns only its own tid.
///
/// # Errors
/// `NoParent` if the parent has exited, or was lost, without sending the list; `SysErr` if the
/// connection to the daemon is lost.
pub(crate) fn wait_for_siblings() -> PvmResult<Vec<Tid>> {
    let rt = session::runtime()?;
    let parent = rt.parent_tid();
    if parent == Tid::NONE {
        return Ok(vec![rt.tid()]);
    }
    if parent.is_task() && session::lock().siblings.is_none() {
        control::watch_exits(&rt, control::TC_PARENT_EXIT, vec![parent]);
    }
    receive::wait_until(&rt, |session| match &session.siblings {
        Some(siblings) => Some(Ok(siblings.clone())),
        // The notification comes after everything that the parent has sent.
        None if session.has_parent_exited => Some(Err(PvmError::NoParent)),
        None => None,
    })?
}

/// Requests the host table from the daemon or from the resource manager.
///
/// # Errors
/// An error of the daemon or of the resource manager.
pub(crate) fn config() -> PvmResult<HostTable> {
    request_connection()?.config().map_err(|error| error.code)
}

/// Returns the data signature of the first host with this architecture.
///
/// # Errors
/// `NotFound` if there is no such host.
pub(crate) fn arch_code(arch: &str) -> PvmResult<i32> {
    let table = config()?;
    table
        .hosts
        .iter()
        .find(|host| host.arch == arch)
        .map(|host| host.dsig)
        .ok_or(PvmError::NotFound)
}

/// Returns the tasks that `selector` selects: all tasks (0), the tasks of one host, or one task.
///
/// # Errors
/// `NoHost` for an unknown host.
pub(crate) fn tasks(selector: i32) -> PvmResult<Vec<TaskInfo>> {
    request_connection()?
        .tasks(Tid::from_raw(selector))
        .map_err(|error| error.code)
}

fn lossy_strings(names: Vec<Vec<u8>>) -> Vec<String> {
    names
        .into_iter()
        .map(|name| String::from_utf8_lossy(&name).into_owned())
        .collect()
}

/// Adds hosts. Each name is a line as in a host file. Returns one result for each name.
///
/// # Errors
/// The whole request failed.
pub(crate) fn add_hosts(names: Vec<Vec<u8>>) -> PvmResult<Vec<AddedHost>> {
    let rt = request_connection()?;
    rt.add_hosts(lossy_strings(names))
        .map_err(|error| error.code)
}

/// Removes hosts by name. Returns one result for each name.
///
/// # Errors
/// The whole request failed.
pub(crate) fn delete_hosts(names: Vec<Vec<u8>>) -> PvmResult<Vec<PvmResult<()>>> {
    let rt = request_connection()?;
    rt.delete_hosts(lossy_strings(names))
        .map_err(|error| error.code)
}

/// Checks that a host is up.
///
/// # Errors
/// `NoHost`, `HostFail`; `BadParam` for an empty name.
pub(crate) fn host_status(name: String) -> PvmResult<()> {
    session::runtime()?;
    if name.is_empty() {
        return Err(PvmError::BadParam);
    }
    expect_done(request_connection()?.request_and_wait(Request::HostStatus { name }))
}

/// Checks that a task exists.
///
/// # Errors
/// `NoTask`; `BadParam` if `tid` cannot be a task.
pub(crate) fn task_status(tid: i32) -> PvmResult<()> {
    session::runtime()?;
    let tid = checked_task_tid(tid)?;
    expect_done(request_connection()?.request_and_wait(Request::TaskStatus { tid }))
}

/// Sends a signal to a task. If the task has already exited, the call succeeds without effect.
///
/// # Errors
/// `BadParam` if `tid` cannot be a task.
pub(crate) fn send_signal(tid: i32, signal: i32) -> PvmResult<()> {
    session::runtime()?;
    let tid = checked_task_tid(tid)?;
    match expect_done(request_connection()?.request_and_wait(Request::Signal { tid, signal })) {
        Err(PvmError::NoTask) => Ok(()),
        other => other,
    }
}

/// Returns the time of day on a host, in microseconds since 1970.
///
/// # Errors
/// `NoHost`, `HostFail`.
pub(crate) fn host_clock(host: i32) -> PvmResult<u64> {
    let rt = request_connection()?;
    match rt.request_and_wait(Request::HostSync {
        host: Tid::from_raw(host),
    }) {
        Reply::Clock(time) => Ok(time.0),
        other => Err(reply_error(&other)),
    }
}

/// Halts the virtual machine.
///
/// A program started from the command line waits until the local daemon has released its runtime
/// directory, so that the program can start another daemon. A spawned task does not wait, because
/// the daemon waits for the task.
///
/// # Errors
/// An error of the daemon. The loss of the connection is the expected result, not an error.
pub(crate) fn halt() -> PvmResult<()> {
    let rt = request_connection()?;
    let paths = runtime_paths(process::real_uid() as u32, env::read_var)
        .ok()
        .filter(|_| rt.parent_tid() == Tid::NONE);
    // The lock file contains the daemon's pid and is the last file that the daemon removes.
    let lock_holder = || fs::read_to_string(paths.as_ref()?.lock_file()).ok();
    let initial_holder = lock_holder();
    match expect_done(rt.request_and_wait(Request::Halt)) {
        Ok(()) | Err(PvmError::SysErr) => {}
        other => return other,
    }
    let deadline = Instant::now() + HALT_TIMEOUT;
    while initial_holder.is_some() && lock_holder() == initial_holder && Instant::now() < deadline {
        thread::sleep(LOCK_POLL_INTERVAL);
    }
    Ok(())
}

/// Returns a new message context that no other task uses.
///
/// # Errors
/// `OutOfRes` if no context is available.
pub(crate) fn new_context() -> PvmResult<i32> {
    match request_connection()?.request_and_wait(Request::NewContext) {
        Reply::Context(ctx) => Ok(ctx),
        other => Err(reply_error(&other)),
    }
}

/// Frees a message context.
///
/// # Errors
/// `NotFound` if the context does not belong to this task.
pub(crate) fn free_context(ctx: i32) -> PvmResult<()> {
    expect_done(request_connection()?.request_and_wait(Request::FreeContext { ctx }))
}

/// Sets the destination of this task's own output.
///
/// # Errors
/// An error of the daemon.
pub(crate) fn set_output(sink: Sink) -> PvmResult<()> {
    expect_done(request_connection()?.request_and_wait(Request::SetOutput(sink)))
}

/// Sets the destination of this task's own trace records.
///
/// # Errors
/// An error of the daemon.
pub(crate) fn set_trace(sink: Sink) -> PvmResult<()> {
    expect_done(request_connection()?.request_and_wait(Request::SetTrace(sink)))
}

/// Removes mailbox entries without an owner: all entries, the entries of the class `name`, or the
/// entry at `index` of this class. With `kills_tasks`, ends all spawned tasks that are not exempt
/// from a reset, and removes all entries without an owner.
///
/// # Errors
/// An error of the daemon.
pub(crate) fn reset(kills_tasks: bool, name: String, index: Option<i32>) -> PvmResult<()> {
    let request = if kills_tasks {
        Request::Reset {
            kill_tasks: kills_tasks,
        }
    } else {
        Request::Mailbox(MailboxRequest::Clean { name, index })
    };
    expect_done(request_connection()?.request_and_wait(request))
}

/// Requests messages about an event. `vals` contains the tids of the watched tasks or hosts. For
/// added hosts and routes, `vals` is not used and `count` is the number of messages.
///
/// # Errors
/// `BadParam` for an unknown event, no tids, or tids that are not tasks.
pub(crate) fn notify(event: i32, tag: i32, count: i32, vals: &[i32]) -> PvmResult<()> {
    let rt = session::runtime()?;
    let is_cancellation = event & NOTIFY_CANCEL != 0;
    let ctx = pvmmyctx.load(Relaxed);
    if tag < 0 && pvmrescode.load(Relaxed) == 0 {
        return Err(PvmError::BadParam);
    }
    let tids: Vec<Tid> = vals.iter().map(|tid| Tid::from_raw(*tid)).collect();
    let send_request = |event| {
        rt.notify(NotifyRequest {
            subjects: event,
            ctx,
            tag,
            is_cancellation,
        })
        .map_err(|error| error.code)
    };
    let result = match event & !NOTIFY_CANCEL {
        1 if count < 1 || !tids.iter().all(|tid| tid.is_task()) => Err(PvmError::BadParam),
        1 => {
            let (own_tids, other_tids): (Vec<Tid>, Vec<Tid>) =
                tids.into_iter().partition(|tid| *tid == rt.tid());
            update_own_exit_notices(own_tids.len(), ctx, tag, is_cancellation, &rt);
            if other_tids.is_empty() {
                Ok(())
            } else {
                send_request(NotifySubjects::TaskExit(other_tids))
            }
        }
        2 if count < 1 => Err(PvmError::BadParam),
        2 => send_request(NotifySubjects::HostDelete(tids)),
        3 => send_request(NotifySubjects::HostAdd {
            messages_max: count,
        }),
        4 => rt.notify_new_routes(ctx, tag, if is_cancellation { 0 } else { count }),
        5 if count < 1 => Err(PvmError::BadParam),
        5 => tids
            .iter()
            .try_for_each(|tid| rt.notify_route_end(*tid, ctx, tag, is_cancellation)),
        _ => Err(PvmError::BadParam),
    };
    // In PVM the request is a message to the daemon, without an answer.
    receive::take_in_after_send(session::lock());
    result
}

/// Adds `request_count` requests for notices about this task's own exit, or cancels `request_count`
/// requests. This library sends these notices, not the daemon. For a cancelled request the notice
/// is sent immediately.
fn update_own_exit_notices(
    request_count: usize,
    ctx: i32,
    tag: i32,
    is_cancellation: bool,
    rt: &Runtime,
) {
    for _ in 0..request_count {
        let mut session = session::lock();
        if !is_cancellation {
            session.own_exit_notices.push((ctx, tag));
        } else if let Some(index) = session
            .own_exit_notices
            .iter()
            .position(|notice| *notice == (ctx, tag))
        {
            session.own_exit_notices.remove(index);
            drop(session);
            notify_own_exit(rt, ctx, tag);
        }
    }
}

/// Delivers the notice about this task's own exit to this task, with its daemon as the sender. The
/// notice waits for a call that takes it in, like the messages of other senders.
pub(crate) fn notify_own_exit(rt: &Runtime, ctx: i32, tag: i32) {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(rt.tid().raw());
    rt.deliver_notice(Message {
        src: Tid::MY_DAEMON,
        dst: rt.tid(),
        ctx,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    });
}

/// Checks the name of a mailbox class, which must not be empty.
fn check_class_name(name: String) -> PvmResult<String> {
    if name.is_empty() {
        Err(PvmError::BadParam)
    } else {
        Ok(name)
    }
}

/// Stores a message in a mailbox class and returns the index of the new entry.
///
/// # Errors
/// `Denied`, `Exists`; `BadParam` for an empty name.
pub(crate) fn mailbox_put(name: String, message: Message, flags: i32) -> PvmResult<i32> {
    session::runtime()?;
    let name = check_class_name(name)?;
    match request_connection()?.request_and_wait(Request::Mailbox(MailboxRequest::Put {
        name,
        flags,
        message,
    })) {
        Reply::MailboxIndex(index) => Ok(index),
        other => Err(reply_error(&other)),
    }
}

/// Fetches a message from a mailbox class.
///
/// # Errors
/// `NotFound`, `Denied`; `BadParam` for an empty name or a negative index.
pub(crate) fn mailbox_take(name: String, index: i32, flags: i32) -> PvmResult<Message> {
    session::runtime()?;
    let name = check_class_name(name)?;
    if index < 0 {
        return Err(PvmError::BadParam);
    }
    match request_connection()?.request_and_wait(Request::Mailbox(MailboxRequest::Take {
        name,
        index,
        flags,
    })) {
        Reply::Mailbox(message) => Ok(message),
        other => Err(reply_error(&other)),
    }
}

/// Removes an entry of a mailbox class.
///
/// # Errors
/// As [`mailbox_take`].
pub(crate) fn mailbox_delete(name: String, index: i32) -> PvmResult<()> {
    session::runtime()?;
    let name = check_class_name(name)?;
    if index < 0 {
        return Err(PvmError::BadParam);
    }
    let request = Request::Mailbox(MailboxRequest::Delete { name, index });
    expect_done(request_connection()?.request_and_wait(request))
}

/// Lists the mailbox classes whose names match `pattern`. The empty pattern matches all classes.
///
/// # Errors
/// An error of the daemon.
pub(crate) fn mailbox_list(pattern: String) -> PvmResult<Vec<MailboxClass>> {
    let rt = request_connection()?;
    match rt.request_and_wait(Request::Mailbox(MailboxRequest::List { pattern })) {
        Reply::MailboxClasses(classes) => Ok(classes),
        other => Err(reply_error(&other)),
    }
}

/// Creates a message with one int, the format of `pvm_insert` and of registrations.
fn int_message(rt: &Runtime, value: i32) -> Message {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(value);
    let own_tid = rt.tid();
    Message {
        src: own_tid,
        dst: own_tid,
        ctx: CTX_BASE,
        tag: 0,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    }
}

/// Stores one int (`pvm_insert`) and returns the index of the entry. With −1 a free index is used,
/// otherwise the given index.
///
/// # Errors
/// `Denied` if the index is not free, `BadParam` for an empty name or an index out of range.
pub(crate) fn mailbox_insert(name: String, index: i32, value: i32) -> PvmResult<i32> {
    let name = check_class_name(name)?;
    let message = int_message(&session::runtime()?, value);
    if index == -1 {
        return mailbox_put(name, message, MBOX_PERSISTENT | MBOX_MULTI_INSTANCE);
    }
    if !(0..MBOX_INDEX_END).contains(&index) {
        return Err(PvmError::BadParam);
    }
    let classes = mailbox_list(name.clone())?;
    let is_occupied = classes.iter().any(|c| {
        c.name == name
            && c.entries
                .iter()
                .any(|(entry_index, _, _)| *entry_index == index)
    });
    if is_occupied {
        Err(PvmError::Denied)
    } else {
        mailbox_put(name, message, MBOX_PERSISTENT | index << MBOX_INDEX_SHIFT)
    }
}

/// Reads one int (`pvm_lookup`) and returns it after its index; −1 selects the first entry.
///
/// # Errors
/// `NotFound`; `BadMsg` if the entry is not an int.
pub(crate) fn mailbox_lookup(name: String, index: i32) -> PvmResult<(i32, i32)> {
    let lookup_at = |index: i32| {
        let message = mailbox_take(name.clone(), index, 0)?;
        let value = libpvm::Vm::unpack(&message)
            .and_then(|mut body| Ok(body.read_int()?))
            .map_err(|_| PvmError::BadMsg)?;
        Ok((index, value))
    };
    if index != -1 {
        return lookup_at(index);
    }
    let classes = mailbox_list(check_class_name(name.clone())?)?;
    let entries = classes
        .into_iter()
        .filter(|class| class.name == name)
        .flat_map(|class| class.entries);
    for (index, _, _) in entries {
        match lookup_at(index) {
            // The entry was removed between the two requests.
            Err(PvmError::NotFound) => (),
            result => return result,
        }
    }
    Err(PvmError::NotFound)
}

/// Stores this task's tid in a mailbox class and returns the index of the new entry.
///
/// # Errors
/// As [`mailbox_put`].
pub(crate) fn put_own_tid(name: &str) -> PvmResult<i32> {
    let rt = session::runtime()?;
    mailbox_put(
        name.to_string(),
        int_message(&rt, rt.tid().raw()),
        MBOX_MULTI_INSTANCE,
    )
}

/// Returns the tids of the tasks that a reset does not end.
///
/// # Errors
/// An error of the daemon.
pub(crate) fn no_reset_tasks() -> PvmResult<Vec<i32>> {
    let classes = mailbox_list(sempa_proto::sm::NO_RESET_CLASS.to_string())?;
    let entries = classes
        .into_iter()
        .filter(|c| c.name == sempa_proto::sm::NO_RESET_CLASS);
    let mut tids = Vec::new();
    for (index, _, _) in entries.flat_map(|c| c.entries) {
        match mailbox_lookup(sempa_proto::sm::NO_RESET_CLASS.to_string(), index) {
            Ok((_, tid)) => tids.push(tid),
            // The task exited between the two requests.
            Err(PvmError::NotFound) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(tids)
}

/// Queries internal counters of the daemon (`pvm_tickle`). Returns the numbers of the answer.
///
/// # Errors
/// `BadParam` if `query` is empty or too long.
pub(crate) fn query_daemon_counters(query: Vec<i32>) -> PvmResult<Vec<i32>> {
    match request_connection()?.request_and_wait(Request::DebugQuery(query)) {
        Reply::DebugValues(counters) => Ok(counters),
        other => Err(reply_error(&other)),
    }
}

/// Registers this task as the resource manager and stores its tid in the mailbox class of resource
/// managers. Returns the tid of the previous resource manager (0 if there was none) and the
/// master's host entry.
///
/// # Errors
/// `Already` or `Denied` if another task is the resource manager.
pub(crate) fn register_rm() -> PvmResult<(i32, Option<HostEntry>)> {
    let rt = request_connection()?;
    let (previous_rm, master) = rt
        .register_rm(RmServices {
            placement: true,
            vm_requests: true,
            task_exits: true,
        })
        .map_err(|error| error.code)?;
    put_own_tid(sempa_proto::sm::RM_CLASS)?;
    Ok((previous_rm.raw(), master))
}

/// Starts to serve the daemon in the role `service`, or stops if this task serves already. While
/// this task serves, the role's mailbox class contains its tid.
///
/// # Errors
/// `Already` if another task serves, `HosterNotMaster` for a hoster on another host than the
/// master's.
pub(crate) fn toggle_service(service: Service) -> PvmResult<()> {
    let rt = request_connection()?;
    let class = match service {
        Service::Hoster => sempa_proto::sm::HOSTER_CLASS,
        Service::Tasker => sempa_proto::sm::TASKER_CLASS,
    };
    let message = int_message(&rt, rt.tid().raw());
    update_service_entry(
        &rt,
        rt.request_and_wait(Request::Serve(service)),
        class,
        message,
        MBOX_MULTI_INSTANCE,
    )
}

/// Registers this task as the tracer, or unregisters this task if it is the tracer already. While
/// this task is the tracer, the mailbox class of the tracer contains its settings.
///
/// # Errors
/// `Already` if another task is the tracer.
pub(crate) fn toggle_tracer(settings: TracerSettings) -> PvmResult<()> {
    let rt = request_connection()?;
    let TracerSettings {
        trace_ctx,
        trace_tag,
        out_ctx,
        out_tag,
        event_mask,
        buffer_bytes,
        trace_option: options,
    } = &settings;
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_items([rt.tid().raw(), *trace_ctx, *trace_tag, *out_ctx, *out_tag]);
    body.pack_str(event_mask)
        .pack_items([*buffer_bytes, *options]);
    let own_tid = rt.tid();
    let message = Message {
        src: own_tid,
        dst: own_tid,
        ctx: CTX_BASE,
        tag: 0,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    };
    let reply = rt.request_and_wait(Request::ServeTracer(settings));
    update_service_entry(&rt, reply, sempa_proto::sm::TRACER_CLASS, message, 0)
}

fn update_service_entry(
    rt: &Runtime,
    reply: Reply,
    class: &str,
    message: Message,
    flags: i32,
) -> PvmResult<()> {
    match reply {
        Reply::Serving(true) => mailbox_put(class.to_string(), message, flags).map(drop),
        Reply::Serving(false) => {
            let entries = mailbox_list(class.to_string())?
                .into_iter()
                .filter(|c| c.name == class)
                .flat_map(|c| c.entries);
            for (index, owner, _) in entries {
                if owner == rt.tid() {
                    mailbox_delete(class.to_string(), index)?;
                }
            }
            Ok(())
        }
        other => Err(reply_error(&other)),
    }
}
