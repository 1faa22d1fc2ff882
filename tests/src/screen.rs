//! A virtual display in a host, for programs that draw. Tests read its pixels and move its mouse.

use crate::Host;
use crate::run::{RunningCommand, run_ok, wait_for};
use anyhow::{Context, Result, bail, ensure};
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for the X server to start, and for one dump, on a loaded machine.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Required programs, each with its Debian package.
const PROGRAMS: [(&str, &str); 3] = [
    ("/usr/bin/Xvfb", "xvfb"),
    ("/usr/bin/xwd", "x11-apps"),
    ("/usr/bin/xdotool", "xdotool"),
];
/// Path in the host of the file with a dump of the display.
const DUMP_PATH: &str = "/tmp/screen.xwd";
/// Number of 32-bit words of a dump's header; the window's name follows them.
const HEAD_WORDS: usize = 25;
const COLOUR_ENTRY_BYTES: usize = 12;
const PIXEL_BYTES: usize = 4;

/// Returns why no display can run on this machine; `None` if one can.
pub fn lacks() -> Option<String> {
    let missing = PROGRAMS.iter().find(|(path, _)| !Path::new(path).exists());
    missing.map(|(path, package)| format!("{path} is missing: install {package}"))
}

/// A display of a host. Its X server listens only on sockets within the host, and ends with the
/// host at the latest.
#[derive(Debug)]
pub struct Screen<'a> {
    host: &'a Host,
    server: RunningCommand,
    name: String,
}

impl<'a> Screen<'a> {
    /// Starts an X server in a host, with the first free display number.
    pub fn start(host: &'a Host) -> Result<Screen<'a>> {
        let mut command = host.command(PROGRAMS[0].0);
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
        // disconnects, and refuses clients that connect at that moment.
        command.arg("-noreset");
        let server = RunningCommand::start(command, Stdio::null())?;
        let number = wait_for(STARTUP_TIMEOUT, || match server.out_so_far() {
            Ok(out) if out.ends_with('\n') => Ok(out.trim().to_string()),
            other => Err(format!(
                "the server names no display: {other:?}, {:?}",
                server.err_so_far()
            )),
        })?;
        Ok(Screen {
            host,
            server,
            name: format!(":{number}"),
        })
    }

    /// Returns the value of `DISPLAY` for programs of the host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dumps the display and returns its pixels.
    pub fn picture(&self) -> Result<Picture> {
        let mut command = self.command(PROGRAMS[1].0);
        command.args(["-root", "-silent", "-out", DUMP_PATH]);
        run_ok(command, STARTUP_TIMEOUT)?;
        let dump = std::fs::read(self.host.machine_path(DUMP_PATH))?;
        std::fs::remove_file(self.host.machine_path(DUMP_PATH))?;
        Picture::parse_dump(&dump)
    }

    /// Moves the mouse and presses its buttons. `words` are the arguments of xdotool.
    ///
    /// # Errors
    /// xdotool refuses the arguments.
    pub fn mouse(&self, words: &str) -> Result<()> {
        let mut command = self.command(PROGRAMS[2].0);
        command.args(words.split_whitespace());
        run_ok(command, STARTUP_TIMEOUT).map(|_| ())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.host.command(program);
        command.env("DISPLAY", &self.name);
        command
    }

    /// Ends the X server.
    ///
    /// # Errors
    /// The server cannot be ended.
    pub fn end(self) -> Result<()> {
        self.server.end_inside()
    }
}

/// A colour by red, green and blue.
pub type Colour = [u8; 3];
/// The colour of the background.
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
    fn parse_dump(dump: &[u8]) -> Result<Picture> {
        let word = |at: usize| -> Result<usize> {
            let bytes = dump
                .get(at * 4..at * 4 + 4)
                .context("the dump has no head")?;
            Ok(u32::from_be_bytes(bytes.try_into()?) as usize)
        };
        ensure!(word(0)? >= HEAD_WORDS * 4, "no dump of xwd");
        let (width, height, low_first) = (word(4)?, word(5)?, word(7)? == 0);
        let (bits, line) = (word(11)?, word(12)?);
        ensure!(
            bits == PIXEL_BYTES * 8 && low_first && line >= width * PIXEL_BYTES,
            "a dump of another form: {bits} bits"
        );
        let from = word(0)? + word(19)? * COLOUR_ENTRY_BYTES;
        let Some(body) = dump.get(from..from + line * height) else {
            bail!("the dump is cut")
        };
        let rows = body
            .chunks_exact(line)
            .flat_map(|row| row[..width * PIXEL_BYTES].chunks_exact(PIXEL_BYTES));
        Ok(Picture {
            width,
            pixels: rows.map(|pixel| [pixel[2], pixel[1], pixel[0]]).collect(),
        })
    }

    /// Returns the pixels within these lines and columns, line by line.
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
    /// order of their appearance, then each line of pixels as runs of one colour.
    pub fn text(&self) -> String {
        let mut colours: Vec<Colour> = Vec::new();
        let mut lines = String::new();
        for row in self.pixels.chunks_exact(self.width) {
            for same in row.chunk_by(|left, right| left == right) {
                let known = colours.iter().position(|colour| *colour == same[0]);
                let place = known.unwrap_or_else(|| {
                    colours.push(same[0]);
                    colours.len() - 1
                });
                lines += &format!("{} of {place}, ", same.len());
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
    fn dump(pixels: &[Colour]) -> Vec<u8> {
        let mut words = [0u32; HEAD_WORDS];
        let line = (pixels.len() * PIXEL_BYTES) as u32;
        for (place, word) in [
            (0, 100),
            (4, pixels.len() as u32),
            (5, 1),
            (11, 32),
            (12, line),
            (19, 1),
        ] {
            words[place] = word;
        }
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
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
            Picture::parse_dump(&dump(&[BLACK, BLACK, [1, 2, 3], WHITE])).expect("a dump");
        assert_eq!(
            picture.text(),
            "0 is [0, 0, 0]\n1 is [1, 2, 3]\n2 is [255, 255, 255]\n2 of 0, 1 of 1, 1 of 2, \n"
        );
        assert_eq!(picture.pixels_in(0..1, 1..3), [BLACK, [1, 2, 3]]);
    }

    #[test]
    fn a_dump_that_is_cut_is_an_error() {
        let whole = dump(&[BLACK, WHITE]);
        assert!((0..whole.len()).all(|len| Picture::parse_dump(&whole[..len]).is_err()));
    }
}
