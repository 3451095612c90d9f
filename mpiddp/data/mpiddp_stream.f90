! Feeds mpiddp.data.Stream from Fortran, with mpiddp_stream.c. A sample is an array of C_LOCs, one for each field.
module mpiddp_stream
   use, intrinsic :: iso_c_binding
   implicit none
   private
   public :: stream_open, stream_put, stream_close

   interface
      function c_open(comm, tag, fields) bind(C, name="mpiddp_stream_open_f") result(stream)
         import
         integer(c_int), intent(in), optional :: comm
         integer(c_int), value :: tag
         character(c_char), intent(in) :: fields(*)
         type(c_ptr) :: stream
      end function

      ! Returns 1: sent, 0: dropped, -1: the trainers want no more.
      integer(c_int) function stream_put(stream, sample) bind(C, name="mpiddp_stream_put_f")
         import
         type(c_ptr), value :: stream
         type(c_ptr), intent(in) :: sample(*)
      end function

      subroutine stream_close(stream) bind(C, name="mpiddp_stream_close_f")
         import
         type(c_ptr), value :: stream
      end subroutine
   end interface

contains

   ! `fields` names what a sample has, as in "u float32 64 64; step int64", in C's order: the last index runs fastest,
   ! so u is (64, 64) here as well, and transposed. Without `comm` it is MPI_COMM_WORLD, and MPI is begun if need be.
   type(c_ptr) function stream_open(fields, comm, tag) result(stream)
      character(*), intent(in) :: fields
      integer, intent(in), optional :: comm, tag
      integer(c_int) :: with_tag
      with_tag = 31000
      if (present(tag)) with_tag = tag
      stream = c_open(comm, with_tag, fields//c_null_char)
   end function
end module
