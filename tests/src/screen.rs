//! A virtual display in a host, for programs that draw. Tests read its pixels and move its mouse.

use crate::Host;
use crate::run::{RunningCommand, run_successfully, wait_for};
use anyhow::{Context, Result, bail, ensure};
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for the start of the X server, and for one dump, on a loaded machine.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Required programs: path, and the Debian package that contains it.
const REQUIRED_PROGRAMS: [(&str, &str); 3] = [
    ("/usr/bin/Xvfb", "xvfb"),
    ("/usr/bin/xwd", "x11-apps"),
    ("/usr/bin/xdotool", "xdotool"),
];
/// Path in the host of the file to which the display is dumped.
const DUMP_PATH: &str = "/tmp/screen.xwd";
/// Number of 32-bit words of a dump's header. The window's name follows the header.
const HEADER_WORD_COUNT: usize = 25;
const COLOUR_ENTRY_BYTES: usize = 12;
const PIXEL_BYTES: usize = 4;

/// Returns which requirement of a display this machine does not meet; `None` if it meets all.
pub fn unmet_requirement() -> Option<String> {
    let missing_program = REQUIRED_PROGRAMS
        .iter()
        .find(|(path, _)| !Path::new(path).exists());
    missing_program.map(|(path, package)| format!("{path} is missing: install {package}"))
}

/// A virtual display of a host. Its X server listens only on sockets within the host. The X server
/// ends with the host at the latest.
#[derive(Debug)]
pub struct VirtualDisplay<'a> {
    host: &'a Host,
    server: RunningCommand,
    display_name: String,
}

impl<'a> VirtualDisplay<'a> {
    /// Starts an X server in a host, with the first free display number.
    pub fn start(host: &'a Host) -> Result<Self> {
        let mut command = host.root_command(REQUIRED_PROGRAMS[0].0);
        command.args([
            "-displayfd",
            "1",
            "-screen",
            "0",
            "320x320x24",
            "-nolisten",
            "tcp",
        ]);
        // Without this option the server resets when its last client (for instance a dump)
        // disconnects. It then refuses clients that connect at that moment.
        command.arg("-noreset");
        let server = RunningCommand::start(command, Stdio::null())?;
        let display_number = wait_for(STARTUP_TIMEOUT, || match server.stdout_so_far() {
            Ok(out) if out.ends_with('\n') => Ok(out.trim().to_string()),
            other => Err(format!(
                "the server names no display: {other:?}, {:?}",
                server.stderr_so_far()
            )),
        })?;
        Ok(VirtualDisplay {
            host,
            server,
            display_name: format!(":{display_number}"),
        })
    }

    /// Returns the value of `DISPLAY` for programs on the host.
    pub fn display_name(&self) -> &str {
        &self.display_name
    }

    /// Dumps the display and returns its pixels.
    pub fn dump_picture(&self) -> Result<Picture> {
        let mut command = self.command(REQUIRED_PROGRAMS[1].0);
        command.args(["-root", "-silent", "-out", DUMP_PATH]);
        run_successfully(command, STARTUP_TIMEOUT)?;
        let dump = std::fs::read(self.host.machine_path(DUMP_PATH))?;
        std::fs::remove_file(self.host.machine_path(DUMP_PATH))?;
        Picture::parse_dump(&dump)
    }

    /// Moves the mouse and presses its buttons. `arguments` are the arguments of xdotool, separated
    /// by spaces.
    ///
    /// # Errors
    /// xdotool refuses the arguments.
    pub fn send_mouse_input(&self, arguments: &str) -> Result<()> {
        let mut command = self.command(REQUIRED_PROGRAMS[2].0);
        command.args(arguments.split_whitespace());
        run_successfully(command, STARTUP_TIMEOUT).map(|_| ())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.host.root_command(program);
        command.env("DISPLAY", &self.display_name);
        command
    }

    /// Ends the X server.
    ///
    /// # Errors
    /// The server cannot be ended.
    pub fn stop(self) -> Result<()> {
        self.server.kill_children_and_wait()
    }
}

/// A colour: its red, green and blue parts, each from 0 to 255.
pub type Colour = [u8; 3];
/// The colour of the display's background.
pub const BLACK: Colour = [0; 3];
/// The foreground colour of a drawing with two colours.
pub const WHITE: Colour = [255; 3];

/// The pixels of a display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    pixels: Vec<Colour>,
}

impl Picture {
    /// Parses a dump of xwd with 32 bits per pixel.
    fn parse_dump(dump_bytes: &[u8]) -> Result<Self> {
        let header_word = |index: usize| -> Result<usize> {
            let bytes = dump_bytes
                .get(index * 4..index * 4 + 4)
                .context("the dump has no head")?;
            Ok(u32::from_be_bytes(bytes.try_into()?) as usize)
        };
        ensure!(header_word(0)? >= HEADER_WORD_COUNT * 4, "no dump of xwd");
        let (width, height, is_little_endian) =
            (header_word(4)?, header_word(5)?, header_word(7)? == 0);
        let (bits_per_pixel, line_bytes) = (header_word(11)?, header_word(12)?);
        ensure!(
            bits_per_pixel == PIXEL_BYTES * 8
                && is_little_endian
                && line_bytes >= width * PIXEL_BYTES,
            "a dump of another form: {bits_per_pixel} bits"
        );
        let pixels_offset = header_word(0)? + header_word(19)? * COLOUR_ENTRY_BYTES;
        let Some(pixel_bytes) = dump_bytes.get(pixels_offset..pixels_offset + line_bytes * height)
        else {
            bail!("the dump is cut")
        };
        let pixel_slices = pixel_bytes
            .chunks_exact(line_bytes)
            .flat_map(|row| row[..width * PIXEL_BYTES].chunks_exact(PIXEL_BYTES));
        Ok(Self {
            width,
            pixels: pixel_slices
                .map(|pixel| [pixel[2], pixel[1], pixel[0]])
                .collect(),
        })
    }

    /// Returns the pixels in the given lines and columns, line by line.
    pub fn pixels_in(&self, lines: Range<usize>, columns: Range<usize>) -> Vec<Colour> {
        let rows = self
            .pixels
            .chunks_exact(self.width)
            .skip(lines.start)
            .take(lines.len());
        rows.flat_map(|row| row[columns.clone()].iter().copied())
            .collect()
    }

    /// Returns the picture as a text that tests can compare line by line: first the colours in the
    /// order of their first occurrence, then each line of pixels as runs of one colour.
    pub fn to_text(&self) -> String {
        let mut colours: Vec<Colour> = Vec::new();
        let mut lines = String::new();
        for row in self.pixels.chunks_exact(self.width) {
            for run in row.chunk_by(|left, right| left == right) {
                let known_index = colours.iter().position(|colour| *colour == run[0]);
                let colour_index = known_index.unwrap_or_else(|| {
                    colours.push(run[0]);
                    colours.len() - 1
                });
                lines += &format!("{} of {colour_index}, ", run.len());
            }
            lines.push('\n');
        }
        let legend: String = colours
            .iter()
            .enumerate()
            .map(|(i, colour)| format!("{i} is {colour:?}\n"))
            .collect();
        legend + &lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a dump of a display with one line of pixels.
    fn make_dump(pixels: &[Colour]) -> Vec<u8> {
        let mut header = [0u32; HEADER_WORD_COUNT];
        let line_bytes = (pixels.len() * PIXEL_BYTES) as u32;
        for (index, header_value) in [
            (0, 100),
            (4, pixels.len() as u32),
            (5, 1),
            (11, 32),
            (12, line_bytes),
            (19, 1),
        ] {
            header[index] = header_value;
        }
        let mut bytes: Vec<u8> = header
            .iter()
            .flat_map(|header_value| header_value.to_be_bytes())
            .collect();
        bytes.extend([7; COLOUR_ENTRY_BYTES]);
        bytes.extend(
            pixels
                .iter()
                .flat_map(|[red, green, blue]| [*blue, *green, *red, 0]),
        );
        bytes
    }

    #[test]
    fn dump_is_parsed_and_shown_as_text() {
        let picture =
            Picture::parse_dump(&make_dump(&[BLACK, BLACK, [1, 2, 3], WHITE])).expect("a dump");
        assert_eq!(
            picture.to_text(),
            "0 is [0, 0, 0]\n1 is [1, 2, 3]\n2 is [255, 255, 255]\n2 of 0, 1 of 1, 1 of 2, \n"
        );
        assert_eq!(picture.pixels_in(0..1, 1..3), [BLACK, [1, 2, 3]]);
    }

    #[test]
    fn truncated_dump_is_refused() {
        let complete_dump = make_dump(&[BLACK, WHITE]);
        assert!(
            (0..complete_dump.len()).all(|len| Picture::parse_dump(&complete_dump[..len]).is_err())
        );
    }
}
