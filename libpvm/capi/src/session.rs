//! State of this process as a task: its connection to the daemon, its buffers and its received
//! messages.
//!
//! One lock guards the whole state. No thread has the lock while code of the program runs (message
//! handlers, matching functions) or while a call waits, so the code of the program may call the
//! library again.

use crate::abi::NO_EVENTS_MASK;
use crate::buffers::{Buffer, Buffers, Enc};
use crate::data::{
    error_text, pvm_errno, pvm_useruid, pvmautoerr, pvmctrc, pvmdebmask, pvmmyctx, pvmmydsig,
    pvmmyptid, pvmmytid, pvmmyupid, pvmnoreset, pvmnoresetindex, pvmnsibs, pvmrouteopt,
    pvmschedtid, pvmtrc,
};
use crate::env;
use crate::handlers::Handlers;
use crate::memory::Strided;
use crate::options::ROUTE_NONE;
use crate::output::OutputCatcher;
use crate::pack;
use crate::process;
use crate::receivable::{ReceivableList, Request};
use crate::receive::{self, Matcher};
use libpvm::{EnrollError, Runtime};
use sempa_proto::task::OnDaemonExit;
use sempa_proto::{Message, PvmError, PvmResult, Tid};
use sempa_ring::biased_lock::{BiasedLock, BiasedLockGuard};
use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;

/// State of this process as a task. [`lock`] locks and returns this state.
#[derive(Default)]
pub(crate) struct Session {
    /// The connection to the daemon; `None` before the first enrolment. The value stays after the
    /// connection is lost.
    pub(crate) runtime: Option<Runtime>,
    pub(crate) buffers: Buffers,
    /// Number of the active send buffer; 0 if there is none.
    pub(crate) send_buffer_id: i32,
    /// Number of the active receive buffer; 0 if there is none.
    pub(crate) receive_buffer_id: i32,
    /// The messages that can be received.
    pub(crate) receivable: ReceivableList,
    pub(crate) handlers: Handlers,
    /// Matching function that the program set with `pvm_recvf`.
    pub(crate) matcher: Option<Matcher>,
    /// State of the output of children that this task prints.
    pub(crate) output_catcher: OutputCatcher,
    /// Tids of all tasks of the spawn that started this task; `None` while the tids are unknown.
    pub(crate) siblings: Option<Vec<Tid>>,
    /// True after the notification of the parent's exit.
    pub(crate) has_parent_exited: bool,
    /// Context and tag of each notice that this task requested about its own exit.
    pub(crate) own_exit_notices: Vec<(i32, i32)>,
}

static SESSION: LazyLock<BiasedLock<Session>> = LazyLock::new(|| {
    read_environment();
    BiasedLock::new(Session::default())
});

/// The session is locked until this guard is dropped.
pub(crate) type SessionGuard = BiasedLockGuard<'static, Session>;

/// Locks the session until the guard is dropped.
#[inline]
pub(crate) fn lock() -> SessionGuard {
    SESSION.lock()
}

/// Reads the settings that the parent passes in the environment.
fn read_environment() {
    let env_number =
        |name: &str| env::read_var(name).map(|text| env::parse_number(text.as_bytes()));
    if let Some(ctx) = env_number("PVMCTX") {
        pvmmyctx.store(ctx, Relaxed);
    }
    if let Some(mask) = env_number("PVMTASKDEBUG") {
        pvmdebmask.store(mask, Relaxed);
    }
    for tracer in [&pvmtrc, &pvmctrc] {
        tracer.set_mask(&NO_EVENTS_MASK);
        if let Some(mask) =
            env::read_var("PVMTMASK").filter(|mask| mask.len() + 1 == NO_EVENTS_MASK.len())
        {
            tracer.set_mask(mask.as_bytes());
        }
        tracer
            .trace_buf
            .store(env_number("PVMTRCBUF").unwrap_or(0), Relaxed);
        tracer
            .trace_opt
            .store(env_number("PVMTRCOPT").unwrap_or(0), Relaxed);
    }
}

impl Session {
    /// Frees a buffer. If the buffer was active for sending or receiving, no buffer is active for
    /// that purpose afterwards.
    ///
    /// # Errors
    /// As [`Buffers::remove`].
    pub(crate) fn free_buffer(&mut self, mid: i32) -> PvmResult<()> {
        if let Some(list_entry) = self.buffers.free(mid)? {
            self.receivable.remove(list_entry);
        }
        if self.send_buffer_id == mid {
            self.send_buffer_id = 0;
        }
        if self.receive_buffer_id == mid {
            self.receive_buffer_id = 0;
        }
        Ok(())
    }

    /// Stores a received message and appends it to the list of messages that can be received.
    ///
    /// # Errors
    /// As [`Buffers::add`].
    pub(crate) fn queue_message(&mut self, message: Message) -> PvmResult<()> {
        self.queue_buffer(Buffer::from_message(message).into())
    }

    /// As [`Session::queue_message`], for a message that is stored in `buffer`.
    ///
    /// # Errors
    /// As [`Buffers::add`].
    #[inline]
    pub(crate) fn queue_buffer(&mut self, buffer: Box<Buffer>) -> PvmResult<()> {
        let header = buffer.header();
        let mid = self.buffers.add(buffer)?;
        self.buffers.get_mut(mid)?.list_entry = Some(self.receivable.push(mid, header));
        Ok(())
    }

    /// Returns the number of the oldest message in the list that `request` accepts.
    pub(crate) fn find_receivable(&mut self, request: &Request) -> Option<i32> {
        let Self {
            receivable,
            buffers,
            ..
        } = self;
        receivable.find(request, |mid| buffers.get(mid).map(Buffer::header).ok())
    }

    /// Must be called before the header of a buffer can change: by the program, or because the
    /// program sends the buffer. Searches then read the headers of the messages in the list.
    pub(crate) fn expect_header_change(&mut self, mid: i32) {
        if self
            .buffers
            .get(mid)
            .is_ok_and(|buffer| buffer.list_entry.is_some())
        {
            self.receivable.expect_header_change();
        }
    }

    /// Removes a message from the list of messages that can be received, if the list contains it.
    pub(crate) fn unqueue_message(&mut self, mid: i32) {
        if let Ok(buffer) = self.buffers.get_mut(mid)
            && let Some(list_entry) = buffer.list_entry.take()
        {
            self.receivable.remove(list_entry);
        }
    }

    /// Frees the active receive buffer if there is one.
    pub(crate) fn free_receive_buffer(&mut self) {
        let mid = std::mem::take(&mut self.receive_buffer_id);
        if mid != 0 {
            // The call fails if the program has already freed the buffer by its number.
            let _ = self.free_buffer(mid);
        }
    }

    /// Creates an empty buffer of this task and returns its number.
    ///
    /// # Errors
    /// As [`Buffers::add`].
    pub(crate) fn new_buffer(&mut self, enc: Enc) -> PvmResult<i32> {
        let src = pvmmytid.load(Relaxed).max(0);
        self.buffers.create(enc, src)
    }

    /// Creates an empty send buffer in the memory of the active one, which is freed. Returns the
    /// number of the new buffer; `None` if this is not possible.
    #[inline]
    pub(crate) fn recreate_send_buffer(&mut self, enc: Enc) -> Option<i32> {
        let src = pvmmytid.load(Relaxed).max(0);
        let previous_mid = self.send_buffer_id;
        if previous_mid == self.receive_buffer_id {
            return None;
        }
        self.send_buffer_id = self.buffers.recreate(previous_mid, enc, src)?;
        Some(self.send_buffer_id)
    }

    /// True if taking in a message may have an effect that the program sees at once: the program
    /// has handlers or prints the output of children.
    pub(crate) fn has_intake_effects(&self) -> bool {
        !self.handlers.is_empty() || self.output_catcher.is_active()
    }

    /// Moves the active send buffer to memory that tasks of this host can read, if packing `items`
    /// makes a large message of it.
    pub(crate) fn prepare_large_body<T: Copy>(&mut self, items: &Strided<T>) {
        if let Some(rt) = &self.runtime
            && let Ok(buffer) = self.buffers.get_mut(self.send_buffer_id)
        {
            pack::prepare_large_body(buffer, items, |len| rt.allocate_body(len));
        }
    }

    /// Returns the active send buffer.
    ///
    /// # Errors
    /// `NoBuf` if there is none.
    pub(crate) fn send_buffer(&mut self) -> PvmResult<&mut Buffer> {
        self.buffers
            .get_mut(self.send_buffer_id)
            .map_err(|_| PvmError::NoBuf)
    }

    /// Returns the active receive buffer.
    ///
    /// # Errors
    /// `NoBuf` if there is none.
    pub(crate) fn receive_buffer(&mut self) -> PvmResult<&mut Buffer> {
        self.buffers
            .get_mut(self.receive_buffer_id)
            .map_err(|_| PvmError::NoBuf)
    }

    /// Returns the connection to the daemon; `None` if the connection is closed or was inherited
    /// over a `fork`.
    pub(crate) fn connected_runtime(&self) -> Option<Runtime> {
        self.runtime
            .as_ref()
            .filter(|rt| rt.is_connected())
            .cloned()
    }

    /// Returns the connection to the daemon. Enrols the process first if it is not a task.
    ///
    /// # Errors
    /// `SysErr` if no daemon accepts the process; a line on standard error gives the reason.
    #[inline]
    pub(crate) fn runtime_or_enrol(&mut self) -> PvmResult<&Runtime> {
        if !self.runtime.as_ref().is_some_and(Runtime::is_connected) {
            self.enrol_process()?;
        }
        Ok(self.runtime.as_ref().expect("just enrolled"))
    }

    fn enrol_process(&mut self) -> PvmResult<()> {
        if let Some(lost_runtime) = self.runtime.take() {
            let is_forked = pvmmyupid.load(Relaxed) != process::process_id();
            if !is_forked {
                log_stderr(&format!("{}\n", lost_runtime.lost_reason()), true);
            }
            self.reset_after_exit();
            receive::forget_arrivals();
            if !is_forked {
                return Err(PvmError::SysErr);
            }
        }
        process::prepare_for_fork();
        let rt = libpvm::enroll(OnDaemonExit::Terminate).map_err(report_enroll_error)?;
        self.adopt_settings(&rt);
        rt.set_accepts_routes(pvmrouteopt.load(Relaxed) != ROUTE_NONE);
        self.runtime = Some(rt);
        Ok(())
    }

    fn adopt_settings(&mut self, rt: &Runtime) {
        pvmmytid.store(rt.tid().raw(), Relaxed);
        pvmmyptid.store(rt.parent_tid().raw(), Relaxed);
        pvmmyupid.store(process::process_id(), Relaxed);
        pvm_useruid.store(process::real_uid(), Relaxed);
        pvmmydsig.store(rt.dsig(), Relaxed);
        pvmschedtid.store(rt.rm().map_or(0, |rm| rm.tid.raw()), Relaxed);
        let (output_sink, trace_sink) = (rt.output_sink(), rt.trace_sink());
        let tracer_settings = rt.tracer_settings();
        for tracer in [&pvmtrc, &pvmctrc] {
            if let Some(tracer_settings) = tracer_settings
                .as_ref()
                .filter(|_| tracer.trace_tid.load(Relaxed) >= 0)
            {
                tracer.set_mask(&tracer_settings.event_mask);
                tracer
                    .trace_buf
                    .store(tracer_settings.buffer_bytes, Relaxed);
                tracer
                    .trace_opt
                    .store(tracer_settings.trace_option, Relaxed);
            }
            // A negative tid means that the program requests no sink, not even an inherited one.
            if tracer.out_tid.load(Relaxed) >= 0 {
                tracer.out_tid.store(output_sink.tid.raw(), Relaxed);
                tracer.out_ctx.store(output_sink.ctx, Relaxed);
                tracer.out_tag.store(output_sink.tag, Relaxed);
            }
            if tracer.trace_tid.load(Relaxed) >= 0 {
                tracer.trace_tid.store(trace_sink.tid.raw(), Relaxed);
                tracer.trace_ctx.store(trace_sink.ctx, Relaxed);
                tracer.trace_tag.store(trace_sink.tag, Relaxed);
            }
        }
    }

    /// Resets the state of a process that stops being a task, and returns the connection. Buffers
    /// and received messages stay.
    pub(crate) fn reset_after_exit(&mut self) -> Option<Runtime> {
        for id in [
            &pvmmytid,
            &pvmmyptid,
            &pvmmyupid,
            &pvmnsibs,
            &pvmnoresetindex,
        ] {
            id.store(-1, Relaxed);
        }
        pvmschedtid.store(0, Relaxed);
        pvmnoreset.store(0, Relaxed);
        self.handlers.clear();
        self.own_exit_notices.clear();
        self.siblings = None;
        self.has_parent_exited = false;
        self.output_catcher = OutputCatcher::default();
        self.runtime.take()
    }
}

/// Reports a failed enrolment in one line; the error line of the calling function follows.
fn report_enroll_error(error: EnrollError) -> PvmError {
    if matches!(error, EnrollError::Root) {
        exit_as_root();
    }
    if pvmautoerr.load(Relaxed) != 0 {
        log_stderr(&format!("{error}\n"), true);
    }
    PvmError::SysErr
}

/// Prints on standard output, as PVM does, that root needs a permission, and exits.
pub(crate) fn exit_as_root() -> ! {
    use std::io::Write;
    // There is no other output on which a closed standard output could be reported.
    let _ = writeln!(
        std::io::stdout(),
        "libpvm {}: {}",
        log_prefix(),
        EnrollError::Root
    );
    std::process::exit(1)
}

/// Returns the connection to the daemon. Enrols the process first if it is not a task.
///
/// # Errors
/// `SysErr` if no daemon accepts the process; a line on standard error gives the reason.
pub(crate) fn runtime() -> PvmResult<Runtime> {
    lock().runtime_or_enrol().cloned()
}

/// Returns the prefix of a log line: `[t40002]`, or `[pid123]` while the process is not a task.
fn log_prefix() -> String {
    match pvmmytid.load(Relaxed) {
        -1 => format!("[pid{}]", process::process_id()),
        tid => format!("[t{tid:x}]"),
    }
}

/// Writes `libpvm [t40002]: text` to standard error. With `omits_colon` the colon after the tid
/// is omitted, as in PVM's log lines.
pub(crate) fn log_stderr(text: &str, omits_colon: bool) {
    let colon = if omits_colon { "" } else { ":" };
    process::write_stderr(format!("libpvm {}{colon} {text}", log_prefix()).as_bytes());
}

/// Sets `pvm_errno` and prints nothing.
pub(crate) fn set_errno(code: i32) {
    pvm_errno.store(code, Relaxed);
}

/// Reports an error as the option `PvmAutoErr` requires, and returns its code. Always sets
/// `pvm_errno`. Mode 0 prints nothing, and mode 1 prints a line. Mode 2 prints a line, leaves the
/// virtual machine and exits. Mode 3 prints a line and aborts.
pub(crate) fn report_error(function_name: &str, code: i32) -> i32 {
    set_errno(code);
    let mode = pvmautoerr.load(Relaxed);
    if mode != 0 {
        log_stderr(
            &format!(
                "{function_name}(): {}\n",
                error_text(code).to_string_lossy()
            ),
            false,
        );
    }
    match mode {
        2 => {
            crate::leave::leave_vm();
            std::process::exit(code);
        }
        3 => std::process::abort(),
        _ => code,
    }
}

/// Returns the value of a call, or reports its error and returns the error code.
pub(crate) fn value_or_report(function_name: &str, result: PvmResult<i32>) -> i32 {
    result.unwrap_or_else(|error| report_error(function_name, error.code()))
}

/// As [`value_or_report`], but prints nothing for the errors in `silent_errors`.
pub(crate) fn value_or_report_except(
    function_name: &str,
    result: PvmResult<i32>,
    silent_errors: &[PvmError],
) -> i32 {
    match result {
        Err(error) if silent_errors.contains(&error) => {
            set_errno(error.code());
            error.code()
        }
        other => value_or_report(function_name, other),
    }
}
