C     The interface for Fortran: one line for each sentence, as in C.
      program fortran
      implicit none
      include 'fpvm3.h'
      integer mytid, info, bufid, ints(4), back(4), bytes, tag, src
      integer nhost, narch, dtid, speed, value, ctx, old, index
      integer ntask, taskid, ptid, host, flag, numt, tids(2), kid
      integer inum, rtag, rlen, i
      double precision dbl(2), dblb(2)
      character*32 name, arch, word
      character*12 text
      external pvmsum
      call pvmfmytid(mytid)
      call pvmfparent(ptid)
      if (ptid .gt. 0) then
         call pvmfrecv(ptid, 1, bufid)
         call pvmfunpack(INTEGER4, ints, 1, 1, info)
         ints(1) = ints(1) * 2
         call pvmfinitsend(PVMDEFAULT, bufid)
         call pvmfpack(INTEGER4, ints, 1, 1, info)
         call pvmfsend(ptid, 2, info)
         call pvmfexit(info)
         stop
      end if
      call holds(mytid .gt. 0, 'pvmfmytid gives a tid')
      call is(ptid, PvmNoParent, 'pvmfparent gives no parent')
      call pvmfinitsend(PVMDEFAULT, bufid)
      call holds(bufid .gt. 0, 'pvmfinitsend gives a buffer')
      do i = 1, 4
         ints(i) = i * 11
      end do
      dbl(1) = 1.5d0
      dbl(2) = -2.5d0
      text = 'hello there'
      call pvmfpack(INTEGER4, ints, 4, 1, info)
      call is(info, PvmOk, 'pvmfpack of integers gives 0')
      call pvmfpack(REAL8, dbl, 2, 1, info)
      call pvmfpack(STRING, text, 12, 1, info)
      call is(info, PvmOk, 'pvmfpack of a text gives 0')
      call pvmfsend(mytid, 7, info)
      call is(info, PvmOk, 'pvmfsend gives 0')
      call pvmfrecv(-1, 7, bufid)
      call holds(bufid .gt. 0, 'pvmfrecv gives a buffer')
      call pvmfbufinfo(bufid, bytes, tag, src, info)
      call is(bytes, 44, 'pvmfbufinfo tells the length')
      call is(tag, 7, 'pvmfbufinfo tells the tag')
      call is(src, mytid, 'pvmfbufinfo tells the sender')
      call pvmfunpack(INTEGER4, back, 4, 1, info)
      call is(back(4), 44, 'pvmfunpack gives what was packed')
      call pvmfunpack(REAL8, dblb, 2, 1, info)
      call holds(dblb(2) .eq. -2.5d0, 'pvmfunpack gives doubles')
      text = ' '
      call pvmfunpack(STRING, text, 12, 1, info)
      call holds(text .eq. 'hello there', 'pvmfunpack gives a text')
      call pvmfunpack(INTEGER4, back, 1, 1, info)
      call is(info, PvmNoData, 'pvmfunpack past the end has no data')
      call pvmfnrecv(-1, 99, bufid)
      call is(bufid, 0, 'pvmfnrecv gives 0 when nothing came')
      call pvmfprobe(-1, 99, bufid)
      call is(bufid, 0, 'pvmfprobe gives 0 when nothing came')
      call pvmftrecv(-1, 99, 0, 50000, bufid)
      call is(bufid, 0, 'pvmftrecv gives 0 after its time')
      call pvmfpsend(mytid, 8, ints, 4, INTEGER4, info)
      call is(info, PvmOk, 'pvmfpsend gives 0')
      call pvmfprecv(-1, 8, back, 4, INTEGER4, src, rtag, rlen, info)
      call is(rlen, 16, 'pvmfprecv tells the length')
      call is(back(2), 22, 'pvmfprecv gets the data')
      nhost = -1
      call pvmfconfig(nhost, narch, dtid, name, arch, speed, info)
      call is(nhost, 1, 'pvmfconfig counts the hosts')
      call holds(name .eq. 'h1', 'pvmfconfig pads the name of a host')
      call holds(arch .eq. 'LINUX64', 'pvmfconfig tells the arch')
      call is(speed, 1000, 'pvmfconfig tells the speed')
      call pvmfmstat('h1  ', info)
      call is(info, PvmOk, 'pvmfmstat trims blanks')
      call pvmfmstat('nohost', info)
      call is(info, PvmNoHost, 'pvmfmstat finds no such host')
      call pvmftidtohost(mytid, dtid)
      call is(dtid, 262144, 'pvmftidtohost gives the host')
      ntask = -1
      call pvmftasks(0, ntask, taskid, ptid, host, flag, word, info)
      call is(ntask, 1, 'pvmftasks counts the tasks')
      call is(taskid, mytid, 'pvmftasks tells a tid')
      call pvmfsetopt(PvmRoute, PvmDontRoute, old)
      call is(old, PvmAllowDirect, 'pvmfsetopt tells the old value')
      call pvmfgetopt(PvmRoute, value)
      call is(value, PvmDontRoute, 'pvmfgetopt tells the value')
      call pvmfnewcontext(ctx)
      call holds(ctx .gt. 0, 'pvmfnewcontext gives a context')
      call pvmfsetcontext(ctx, old)
      call is(old, 0, 'pvmfsetcontext tells the old context')
      call pvmfgetcontext(value)
      call is(value, ctx, 'pvmfgetcontext tells the context')
      call pvmfsetcontext(0, old)
      call pvmfinitsend(PVMDEFAULT, bufid)
      call pvmfpack(INTEGER4, ints, 1, 1, info)
      call pvmfputinfo('fortran box', bufid, 0, index)
      call is(index, 0, 'pvmfputinfo gives the index')
      call pvmfrecvinfo('fortran box', 0, 0, bufid)
      call holds(bufid .gt. 0, 'pvmfrecvinfo gives a buffer')
      call pvmfunpack(INTEGER4, back, 1, 1, info)
      call is(back(1), 11, 'pvmfrecvinfo gets what was stored')
      call pvmfdelinfo('fortran box', 0, 0, info)
      call is(info, PvmOk, 'pvmfdelinfo gives 0')
      call pvmfspawn('fortran', PVMDEFAULT, '*', 1, tids, numt)
      call is(numt, 1, 'pvmfspawn tells how many started')
      kid = tids(1)
      call pvmfinitsend(PVMRAW, bufid)
      call pvmfpack(INTEGER4, 21, 1, 1, info)
      call pvmfnotify(PVMTASKEXIT, 9, 1, tids, info)
      call is(info, PvmOk, 'pvmfnotify gives 0')
      call pvmfsend(kid, 1, info)
      call pvmfrecv(kid, 2, bufid)
      call pvmfunpack(INTEGER4, back, 1, 1, info)
      call is(back(1), 42, 'a child in Fortran answers')
      call pvmfrecv(-1, 9, bufid)
      call pvmfunpack(INTEGER4, back, 1, 1, info)
      call is(back(1), kid, 'the end of a child in Fortran is told')
      call pvmfpstat(kid, info)
      call is(info, PvmNoTask, 'pvmfpstat finds no such task')
      call pvmfjoingroup('fgroup', inum)
      call is(inum, 0, 'pvmfjoingroup gives the instance')
      call pvmfgsize('fgroup', value)
      call is(value, 1, 'pvmfgsize tells the size')
      call pvmfgettid('fgroup', 0, value)
      call is(value, mytid, 'pvmfgettid tells the tid')
      call pvmfbarrier('fgroup', 1, info)
      call is(info, PvmOk, 'pvmfbarrier gives 0')
      call pvmfreduce(PvmSum, ints, 4, INTEGER4, 5, 'fgroup', 0, info)
      call is(info, PvmOk, 'pvmfreduce gives 0')
      call pvmflvgroup('fgroup', info)
      call is(info, PvmOk, 'pvmflvgroup gives 0')
      call pvmfexit(info)
      call is(info, PvmOk, 'pvmfexit gives 0')
      write (*, '(a)') 'end'
      end

      subroutine holds(truth, sentence)
      logical truth
      character*(*) sentence
      if (truth) then
         write (*, '(2a)') 'ok ', sentence
      else
         write (*, '(3a)') 'not ok ', sentence, ': got no, wanted yes'
      end if
      call flush(6)
      end

      subroutine is(got, wanted, sentence)
      integer got, wanted
      character*(*) sentence
      if (got .eq. wanted) then
         write (*, '(2a)') 'ok ', sentence
      else
         write (*, '(3a,i12,a,i12)') 'not ok ', sentence, ': got ',
     >      got, ', wanted ', wanted
      end if
      call flush(6)
      end
